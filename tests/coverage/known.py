"""What does not pass yet, column by column, and why. One line an entry, so that mending one takes out one line.

Every row is proved by test_opinfo.py: an entry that is listed and passes fails the tests, as does one that fails and is
not listed. After a change: `make page`.
"""

from __future__ import annotations

TORCH_OF_PAGE = "2.13.0"  # the torch whose entries these are

NO_CPU = "torch has no kernel for the CPU"
RESIZED = "gives a tensor other memory: refused with the line"
SPARSE = "sparse layout: a recorded value is a dense tensor"
TORCH = "torch's own gradient is wrong or NaN there"

RECORDS: dict[str, str] = {
    "jiterator_2inputs_2outputs": NO_CPU,
    "jiterator_4inputs_with_extra_args": NO_CPU,
    "jiterator_binary": NO_CPU,
    "jiterator_binary_return_by_ref": NO_CPU,
    "jiterator_unary": NO_CPU,
    "nn.functional.batch_norm.without_cudnn": NO_CPU,
    "resize_": RESIZED,
    "resize_as_": RESIZED,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "to_sparse": SPARSE,
    "torch.ops.aten._efficient_attention_forward": NO_CPU,
    "torch.ops.aten._flash_attention_forward": NO_CPU,
}
REPLAYS: dict[str, str] = {}
COMPLEX_VALUES: dict[str, str] = {}
FIRST_ORDER: dict[str, str] = {
    "as_strided_scatter": TORCH,
}
SECOND_ORDER: dict[str, str] = {
    "linalg.norm.subgradients_at_zero": TORCH,
    "masked.logaddexp": TORCH,
}
VARYING: dict[str, str] = {}

KNOWN: dict[str, dict[str, str]] = {
    "records": RECORDS,
    "replays": REPLAYS,
    "complex": COMPLEX_VALUES,
    "first": FIRST_ORDER,
    "second": SECOND_ORDER,
    "varying": VARYING,
}
