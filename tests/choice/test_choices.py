"""The choices of kernels on each architecture, as they are."""

import pytest
from expecttest import assert_expected_inline

from dmattn_ops.call import Demand
from dmattn_ops.choice import arch, choose, config
from tests.choice.test_choose import labels, labels_by_size


def test_the_choices_are_these():
    assert_expected_inline(
        "forward\n" + labels(config.FORWARD) + "\nbackward\n" + labels(config.BACKWARD),
        """\
forward
75: reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128
80: ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_64x64 ampere:Standard_64x64 portable:LowMem_32x32 portable:LowMem_16x16
86: ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_64x64 ampere:Standard_64x64 portable:LowMem_32x32 reference:Legacy_128x128
89: ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_64x64 ampere:Standard_64x64 portable:LowMem_32x32 reference:Legacy_128x128
90: hopper:MediumBlock_128x64 hopper:LargeBlock_192x128 hopper:LargeBlock_128x128 hopper:LargeBlock_128x128 hopper:MediumBlock_128x64 hopper:MediumBlock_128x64 portable:LowMem_32x32 portable:LowMem_16x16
100: portable:Standard_64x64 portable:Standard_64x64 portable:Standard_128x64 portable:Standard_128x64 portable:Standard_128x32 portable:Standard_128x32 portable:LowMem_32x32 portable:LowMem_16x16
120: ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_128x64 ampere:Standard_64x64 ampere:Standard_64x64 portable:LowMem_32x32 reference:Legacy_128x128
backward
75: reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128 reference:Legacy_128x128
80: ampere:Standard_64x64 ampere:Standard_64x64 ampere:Standard_64x64 ampere:Standard_64x64 ampere:Standard_64x64 ampere:Standard_64x64 portable:LowMem_16x16 portable:LowMem_16x16
86: ampere:Standard_64x64 ampere:Standard_64x64 ampere:Standard_64x64 ampere:Standard_64x64 ampere:LowMem_32x32 ampere:LowMem_32x32 portable:LowMem_16x16 reference:Legacy_128x128
89: ampere:Standard_64x64 ampere:Standard_64x64 ampere:Standard_64x64 ampere:Standard_64x64 ampere:LowMem_32x32 ampere:LowMem_32x32 portable:LowMem_16x16 reference:Legacy_128x128
90: hopper:LargeBlock_128x128 hopper:LargeBlock_128x128 hopper:MediumBlock_64x128 hopper:MediumBlock_64x128 hopper256:Standard_64x64 hopper256:Standard_64x64 portable:LowMem_16x16 portable:LowMem_16x16
100: portable:Standard_64x128 portable:Standard_64x128 portable:Standard_64x128 portable:Standard_64x128 portable:LowMem_32x64 portable:LowMem_32x64 portable:LowMem_16x16 portable:LowMem_16x16
120: ampere:Standard_64x64 ampere:Standard_64x64 ampere:Standard_64x64 ampere:Standard_64x64 ampere:LowMem_32x32 ampere:LowMem_32x32 portable:LowMem_16x16 reference:Legacy_128x128""",  # noqa: E501 - a table
    )


def test_the_choices_by_size_are_these():
    sms, dims = (80, 86, 89, 90), (64, 128)
    assert_expected_inline(
        "forward\n"
        + labels_by_size(config.FORWARD, sms, dims)
        + "\nbackward\n"
        + labels_by_size(config.BACKWARD, sms, dims),
        """\
forward
80 D64  few: Standard_128x64  few, long: Standard_128x64  short: Standard_128x64  4096: Standard_128x64  8192: Standard_128x64
80 D128  few: Standard_128x64  few, long: Standard_128x64  short: Standard_128x64  4096: Standard_128x64  8192: Standard_128x64
86 D64  few: Standard_128x64  few, long: Standard_128x64  short: Standard_128x64  4096: Standard_128x64  8192: Standard_128x64
86 D128  few: Standard_128x64  few, long: Standard_128x64  short: Standard_128x64  4096: Standard_128x64  8192: Standard_128x64
89 D64  few: Standard_128x64  few, long: Standard_128x64  short: Standard_128x64  4096: Standard_128x64  8192: Standard_128x64
89 D128  few: Standard_128x64  few, long: Standard_128x64  short: Standard_128x64  4096: Standard_128x64  8192: Standard_128x64
90 D64  few: LargeBlock_192x128  few, long: LargeBlock_192x128  short: LargeBlock_192x128  4096: LargeBlock_192x128  8192: LargeBlock_192x128
90 D128  few: LargeBlock_128x128  few, long: LargeBlock_128x128  short: LargeBlock_128x128  4096: LargeBlock_128x128  8192: LargeBlock_128x128
backward
80 D64  few: Standard_64x64  few, long: Standard_64x64  short: Standard_64x64  4096: Standard_64x64  8192: Standard_64x64
80 D128  few: Standard_64x64  few, long: Standard_64x64  short: Standard_64x64  4096: Standard_64x64  8192: Standard_64x64
86 D64  few: Standard_64x64  few, long: Standard_64x64  short: Standard_64x64  4096: Standard_64x64  8192: Standard_64x64
86 D128  few: Standard_64x64  few, long: Standard_64x64  short: Standard_64x64  4096: Standard_64x64  8192: Standard_64x64
89 D64  few: Standard_64x64  few, long: Standard_64x64  short: Standard_64x64  4096: Standard_64x64  8192: Standard_64x64
89 D128  few: Standard_64x64  few, long: Standard_64x64  short: Standard_64x64  4096: Standard_64x64  8192: Standard_64x64
90 D64  few: LargeBlock_128x128  few, long: LargeBlock_128x128  short: LargeBlock_128x128  4096: LargeBlock_128x128  8192: LargeBlock_128x128
90 D128  few: MediumBlock_64x128  few, long: MediumBlock_64x128  short: MediumBlock_64x128  4096: MediumBlock_64x128  8192: MediumBlock_64x128""",  # noqa: E501 - a table
    )


@pytest.mark.parametrize("rows", [config.FORWARD, config.BACKWARD], ids=["forward", "backward"])
def test_few_tiles_get_no_larger_blocks_than_many(rows):
    for sm in (80, 86, 89, 90, 100, 120):
        for dim in (64, 128):
            few, many = (
                choose.choose(rows, arch.KNOWN[sm], Demand(1, heads, 1024, 1024, dim, dim, 2), lambda kernel: []).row
                for heads in (2, 64)
            )
            assert few.config.block_m <= many.config.block_m and few.config.block_n <= many.config.block_n


def test_rows_say_what_they_rest_on():
    for row in (*config.FORWARD, *config.BACKWARD):
        assert not row.few_tiles or row.evidence
        assert row.min_seqlen == 0 or row.evidence
