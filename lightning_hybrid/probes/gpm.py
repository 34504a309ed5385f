"""How busy the parts of a GPU were between two moments: NVML's GPU performance monitoring, from Hopper on."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.probes.nvml import Nvml, meaning
from lightning_hybrid.probes.values import Unknown, frac

_METRICS = {"utilization_frac": 1, "sm_active_frac": 2, "tensor_active_frac": 5, "dram_active_frac": 10}
"""Field of `DeviceState` and number of the metric: graphics/compute activity, SMs, any tensor core, DRAM bandwidth."""

FIELDS = tuple(_METRICS)


class GpmMeter:
    """Compares two samples of a GPU or MIG slice; they are kept in the driver until `close`.

    Args:
        nvml: The session.
        gpu: Handle of the GPU.
        gpu_instance: Id of the MIG slice's GPU instance, ``None`` for the whole GPU.
    """

    def __init__(self, nvml: Nvml, gpu: Any, gpu_instance: int | None) -> None:
        self._nvml, self._gpu, self._gpu_instance = nvml, gpu, gpu_instance
        self._request: Any = None
        self._samples: list[Any] = []
        self._has_first = False
        self._refused: Unknown | None = None

    def read(self) -> dict[str, Any]:
        """Every field of ``FIELDS``, 0..1 since the last reading, or `Unknown`."""
        found = self._refused or self._read()
        if not isinstance(found, Unknown):
            return dict(found)
        if found.lasting:
            self._refused = found
        return dict.fromkeys(FIELDS, found)

    def close(self) -> None:
        """Gives the samples back."""
        for sample in self._samples:
            self._nvml.call("nvmlGpmSampleFree", sample)
        self._samples, self._has_first = [], False

    def _read(self) -> Any:
        refused = self._prepare()
        if refused is not None:
            return refused
        before, now = self._samples
        taken = self._take(now)
        if isinstance(taken, Unknown):
            self._has_first = False
            return taken
        self._samples.reverse()
        had_first, self._has_first = self._has_first, True
        return self._compare(before, now) if had_first else Unknown("a share needs two samples")

    def _prepare(self) -> Unknown | None:
        if self._samples:
            return None
        support = self._nvml.call("nvmlGpmQueryDeviceSupport", self._gpu)
        if isinstance(support, Unknown):
            return support
        if not support.isSupportedDevice:
            return Unknown("this GPU has no performance monitoring (GPM)", lasting=True)
        request_type = self._nvml.constant("c_nvmlGpmMetricsGet_t")
        if isinstance(request_type, Unknown):
            return request_type
        samples = [self._nvml.call("nvmlGpmSampleAlloc") for _ in range(2)]
        refused = next((sample for sample in samples if isinstance(sample, Unknown)), None)
        if refused is None:
            self._samples, self._request = samples, request_type()
        return refused

    def _take(self, sample: Any) -> Any:
        if self._gpu_instance is None:
            return self._nvml.call("nvmlGpmSampleGet", self._gpu, sample)
        return self._nvml.call("nvmlGpmMigSampleGet", self._gpu, self._gpu_instance, sample)

    def _compare(self, before: Any, now: Any) -> Any:
        request = self._request
        request.version = 1
        request.numMetrics = len(_METRICS)
        request.sample1, request.sample2 = before, now
        for place, number in enumerate(_METRICS.values()):
            request.metrics[place].metricId = number
        answer = self._nvml.call("nvmlGpmMetricsGet", request)
        if isinstance(answer, Unknown):
            return answer
        return {
            name: meaning(metric.nvmlReturn) if metric.nvmlReturn else frac(metric.value)
            for name, metric in zip(_METRICS, answer.metrics, strict=False)
        }
