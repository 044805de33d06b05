"""What the driver is asked about a kernel: the sizes of the parameters that its PTX declares, and no more."""

import pytest

pytest.importorskip("triton.experimental.gluon")
from dmattn_ops.launching import driver, plan
from tests.support.launch_stand_ins import SIGNATURE, Compiled, Driver

PTX = """
.visible .entry scale_param(
	.param .u64 .ptr .global .align 16 scale_param_param_0,
	.param .u64 .ptr .global .align 1 scale_param_param_1,
	.param .u32 scale_param_param_2,
	.param .align 64 .b8 scale_param_param_3[128]
)
.reqntid 128
{
	ld.param.b64 %rd1, [scale_param_param_0];
	mov.b32 %r1, (%r2);
"""


@pytest.fixture
def libcuda(monkeypatch):
    fake = Driver([8, 8, 4, 8, 4, 8, 8])
    monkeypatch.setattr(driver, "driver", lambda: fake.functions)
    return fake


@pytest.mark.parametrize(("asm", "refused"), [({"ptx": PTX}, 0), ({"ptx": ""}, 1), ({}, 1), (None, 1)])
def test_the_driver_is_asked_for_no_parameter_that_the_ptx_does_not_declare(libcuda, asm, refused):
    compiled, libcuda.sizes = Compiled({}), [8, 8, 4, 128]
    if asm is not None:
        compiled.asm = asm
    assert plan._parameter_sizes(compiled) == [8, 8, 4, 128]
    assert libcuda.refused == refused


@pytest.mark.parametrize("declared", [6, 7, 8])
def test_a_kernel_that_declares_fewer_parameters_is_not_launched_through_the_driver(libcuda, declared):
    compiled = Compiled(SIGNATURE)
    compiled.asm = {"ptx": f".entry kernel({'.param .u64 some, ' * declared})"}
    references = [plan.Slot(0, 0), plan.Slot(1, 16), 7, 1 << 40, 1, 0.5, 64]
    assert (plan._packed(compiled, (3, 2, 1), references) is None) == (declared == 6)
