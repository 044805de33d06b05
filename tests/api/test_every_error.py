"""Every `raise` that a caller can meet is reached by a test that states its words."""

import ast
import inspect
import itertools
import sys

from dmattn_ops import bands
from dmattn_ops.api import arguments, functions
from dmattn_ops.checks import require, validation, values
from dmattn_ops.masks import block_mask, documents, prepare, tile_mask
from tests.api import (
    test_checks,
    test_errors,
    test_errors_packed,
    test_mask_errors,
    test_operator_errors,
    test_used_keys,
)

MODULES = (functions, arguments, bands, block_mask, documents, prepare, require, tile_mask, validation, values)
STATED = (
    test_errors.test_a_wrong_call_is_refused_in_words,
    test_errors_packed.test_a_wrong_packed_call_is_refused_in_words,
    test_errors_packed.test_a_wrong_packed_projection_is_refused_in_words,
    test_checks.test_a_call_where_another_attention_shares_the_sequence_is_refused_in_words,
    test_operator_errors.test_the_operator_refuses_what_would_read_out_of_bounds,
    test_operator_errors.test_the_backward_operator_refuses_what_does_not_belong_together,
    test_operator_errors.test_the_mask_operator_refuses_parts_that_do_not_fit,
    test_operator_errors.test_the_interval_operator_refuses_parts_that_do_not_fit,
    test_operator_errors.test_tensors_whose_memory_was_given_back_are_refused,
    test_mask_errors.test_prepare_mask_refuses_in_words,
    test_mask_errors.test_a_mask_prepared_for_other_lengths_is_refused,
    test_mask_errors.test_what_is_no_mask_is_refused,
    test_mask_errors.test_a_part_outside_of_a_mask_is_refused,
    test_mask_errors.test_dynamic_mask_refuses_in_words,
    test_used_keys.test_errors_say_what_was_expected,
    test_checks.test_a_list_with_one_wrong_number_is_refused,
)


def raises(module):
    """Return `(file, first line, last line)` of each raise statement of a module that states something of its own."""
    file = inspect.getsourcefile(module)
    tree = ast.parse(inspect.getsource(module))
    return {(file, node.lineno, node.end_lineno) for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc}


def run(test):
    """Call a test with each combination of its parameters."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    for chosen in itertools.product(*(mark.args[1] for mark in marks)):
        arguments = {}
        for mark, value in zip(marks, chosen, strict=True):
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
            arguments |= dict(zip(map(str.strip, names), value if len(names) > 1 else (value,), strict=True))
        test(**arguments)


def test_every_raise_is_reached_by_a_test_that_states_its_words():
    expected = set().union(*map(raises, MODULES))
    files = {file for file, _, _ in expected}
    executed = set()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        executed.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for test in STATED:
            run(test)
    finally:
        sys.settrace(before)
    missed = {
        (file, first)
        for file, first, last in expected
        if not any((file, line) in executed for line in range(first, last + 1))
    }
    assert not missed, sorted(missed)
