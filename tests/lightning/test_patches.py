"""Replaced attributes come back as they were."""

from __future__ import annotations

from lightning_hybrid.lightning.patches import Patches


class Owner:
    def name(self) -> str:
        return "class"


def test_an_attribute_of_the_class_shows_again() -> None:
    owner, patches = Owner(), Patches()
    patches.replace(owner, "name", lambda original: lambda: "new " + original())
    assert owner.name() == "new class"

    patches.undo()
    patches.undo()

    assert owner.name() == "class"
    assert "name" not in vars(owner)


def test_what_somebody_else_had_put_on_the_instance_stays() -> None:
    owner, patches = Owner(), Patches()
    owner.name = lambda: "theirs"  # type: ignore[method-assign]
    patches.replace(owner, "name", lambda original: lambda: "new " + original())

    patches.undo()

    assert owner.name() == "theirs"
