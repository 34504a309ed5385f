from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hybrid.probes.cgroup import Cgroup, CgroupReading


class Files:
    """A tree of control groups."""

    def __init__(self, root: Path) -> None:
        self.mount, self.membership = root / "cgroup", root / "self"
        self.mount.mkdir()
        self.now_s = 0.0

    def write(self, membership: str, **files: str) -> Files:
        self.membership.write_text(membership)
        for name, text in files.items():
            path = self.mount / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return self

    def reader(self) -> Cgroup:
        return Cgroup(self.mount, self.membership, clock=lambda: self.now_s)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_version_2_inside_a_container(files: Files) -> None:
    files.write(
        "0::/\n",
        memory_DOT_max="1000\n",
        memory_DOT_current="700\n",
        memory_DOT_stat="anon 500\ninactive_file 200\n",
        cpu_DOT_max="150000 100000\n",
        cpu_DOT_stat="usage_usec 5\nnr_periods 40\nnr_throttled 10\n",
    )

    assert files.reader().read() == CgroupReading(1000, 500, 1.5, 40, 10)


def test_the_tightest_group_above_counts(files: Files) -> None:
    files.write(
        "0::/outer/inner\n",
        outer__inner__memory_DOT_max="max\n",
        outer__memory_DOT_max="1000\n",
        outer__memory_DOT_current="400\n",
        outer__inner__cpu_DOT_max="400000 100000\n",
        outer__cpu_DOT_max="max 100000\n",
    )

    assert files.reader().read() == CgroupReading(1000, 400, 4.0)


def test_a_path_of_another_namespace_means_the_mount(files: Files) -> None:
    files.write("0::/docker/abc\n", memory_DOT_max="1000", memory_DOT_current="1")

    assert files.reader().read() == CgroupReading(1000, 1)


def test_version_1(files: Files) -> None:
    files.write(
        "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
        memory__job__memory_DOT_limit_in_bytes="2000",
        memory__job__memory_DOT_usage_in_bytes="900",
        memory__job__memory_DOT_stat="inactive_file 1\ntotal_inactive_file 100\n",
        memory__memory_DOT_limit_in_bytes="9223372036854771712",
        cpu__job__cpu_DOT_cfs_quota_us="50000",
        cpu__job__cpu_DOT_cfs_period_us="100000",
        cpu__job__cpu_DOT_stat="nr_periods 8\nnr_throttled 2\n",
    )

    assert files.reader().read() == CgroupReading(2000, 800, 0.5, 8, 2)


def test_no_limit_is_none(files: Files) -> None:
    files.write(
        "5:cpu:/\n4:memory:/\n",
        memory__memory_DOT_limit_in_bytes="9223372036854771712",
        cpu__cpu_DOT_cfs_quota_us="-1",
        cpu__cpu_DOT_cfs_period_us="100000",
    )

    assert files.reader().read() == CgroupReading()


def test_no_groups_at_all_and_files_that_make_no_sense(files: Files, tmp_path: Path) -> None:
    assert Cgroup(tmp_path / "nowhere", tmp_path / "nothing").read() == CgroupReading()
    files.write("nonsense\n0::/\n", memory_DOT_max="many", cpu_DOT_max="", cpu_DOT_stat="x")
    assert files.reader().read() == CgroupReading()


def test_a_new_limit_is_seen_in_time_and_the_use_at_once(files: Files) -> None:
    files.write("0::/\n", memory_DOT_max="1000", memory_DOT_current="1")
    reader = files.reader()
    reader.read()
    files.write("0::/\n", memory_DOT_max="500", memory_DOT_current="2")

    soon = reader.read()
    files.now_s = 11.0

    assert (soon.memory_limit_bytes, soon.memory_used_bytes) == (1000, 2)
    assert reader.read().memory_limit_bytes == 500
