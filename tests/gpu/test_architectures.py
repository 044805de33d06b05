"""`DMATTN_ARCH` on a GPU: calls are dispatched as another architecture would, say so, and stay within the budget."""

from __future__ import annotations

import pytest

from dmattn_ops import environment
from dmattn_ops.testing import Problem, check

pytestmark = pytest.mark.gpu
VERSIONS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


def check_as(version: str, problem: Problem, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """Check a problem as `version` would run it, and that the choice of its backward is of that architecture."""
    monkeypatch.setenv(environment.ARCHITECTURE, version)
    monkeypatch.setenv(environment.PROFILE, "1")
    check(problem, "cuda")
    assert f"Choice=SM{version.replace('.', '')}_" in capfd.readouterr().err


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("version", VERSIONS)
def test_masked_calls(version: str, dim: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    problem = Problem(
        dtype="bfloat16", batch=2, heads=4, heads_k=2, seqlen_q=300, seqlen_k=300, dim=dim, dim_v=dim, mask="random",
        is_causal=True,
    )  # fmt: skip
    check_as(version, problem, monkeypatch, capfd)


@pytest.mark.parametrize("keys", [4096, 8192])
@pytest.mark.parametrize("version", VERSIONS)
def test_tiers_of_long_sequences(
    version: str, keys: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    problem = Problem(
        dtype="float16", heads=4, heads_k=4, seqlen_q=512, seqlen_k=keys, dim=64, dim_v=64, is_causal=True
    )
    check_as(version, problem, monkeypatch, capfd)


@pytest.mark.parametrize("version", VERSIONS)
def test_float32(version: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    problem = Problem(dtype="float32", heads=2, heads_k=2, seqlen_q=200, seqlen_k=200, dim=64, dim_v=64, bias=True)
    check_as(version, problem, monkeypatch, capfd)
