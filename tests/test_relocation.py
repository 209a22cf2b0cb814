"""Meshes that a test has moved, as its worker processes make them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import worqr
from worqr.embedded import Relocation, relocate


@pytest.fixture
def moved() -> Iterator[None]:
    relocate(Relocation("redis://shop.example.org", "shop", "redis://127.0.0.1:7000", "bench1"))
    try:
        yield
    finally:
        relocate(None)


@pytest.mark.usefixtures("moved")
def test_a_mesh_of_the_moved_server_and_prefix_is_at_the_new_one_without_its_users() -> None:
    mesh = worqr.Mesh("redis://shop.example.org", prefix="shop", credentials=lambda: ("ada", "secret"))
    assert (mesh.url, mesh.prefix, mesh.credentials) == ("redis://127.0.0.1:7000", "bench1", None)


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize(
    ("url", "prefix"), [("redis://shop.example.org", "other"), ("redis://other", "shop"), (None, "shop")]
)
def test_all_other_meshes_stay_where_they_are(url: str | None, prefix: str) -> None:
    mesh = worqr.Mesh(url, prefix=prefix)
    assert (mesh.url, mesh.prefix) == (url, prefix)


def test_nothing_is_moved_by_itself() -> None:
    assert worqr.Mesh("redis://shop.example.org", prefix="shop").prefix == "shop"
