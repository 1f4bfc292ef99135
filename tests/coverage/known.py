"""What does not pass yet, column by column, and why. One line an entry, so that mending one takes out one line.

Every row is proved by test_opinfo.py: an entry that is listed and passes fails the tests, as does one that fails and is
not listed. After a change: `make page`.
"""

from __future__ import annotations

TORCH_OF_PAGE = "2.13.0"  # the torch whose entries these are

BEYOND = "reads memory beyond its argument, which a fed value does not have: refused with the line"
DATA = "the size of the result is read from the data: that of the sample, which a note says"
LEAVES = "gives a Python value: that of the sample, which a note says, or a guard holds to"
LINES = "the call means something else at some sizes, and is refused there"
NUMBERS = "torch's composite or formula asks for numbers: the size is fixed, which is said, and others are refused"
RESIZED = "gives a tensor other memory: refused with the line"
SPARSE = "sparse layout: a recorded value is a dense tensor"
TALL = "tall and wide matrices have different formulas: a recording holds for one of them, and refuses the other"
TORCH = "torch's own gradient is wrong or NaN there"

RECORDS: dict[str, str] = {
    "as_strided.partial_views": BEYOND,
    "resize_": RESIZED,
    "resize_as_": RESIZED,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "to_sparse": SPARSE,
}
REPLAYS: dict[str, str] = {
    "allclose": LEAVES,
    "equal": LEAVES,
    "item": LEAVES,
    "nn.functional.one_hot": DATA,
}
COMPLEX_VALUES: dict[str, str] = {
    "item": LEAVES,
}
FIRST_ORDER: dict[str, str] = {
    "as_strided_scatter": TORCH,
}
SECOND_ORDER: dict[str, str] = {}
VARYING: dict[str, str] = {
    "block_diag": NUMBERS,
    "combinations": NUMBERS,
    "corrcoef": NUMBERS,
    "cov": NUMBERS,
    "cross": LINES,
    "fft.hfft2": NUMBERS,
    "fft.hfftn": NUMBERS,
    "gradient": NUMBERS,
    "hash_tensor": NUMBERS,
    "kron": NUMBERS,
    "linalg.cond": TALL,
    "linalg.lstsq.grad_oriented": TALL,
    "linalg.lu": TALL,
    "linalg.matrix_norm": NUMBERS,
    "linalg.matrix_rank": TALL,
    "linalg.multi_dot": NUMBERS,
    "linalg.norm": TALL,
    "linalg.norm.subgradients_at_zero": TALL,
    "linalg.pinv": TALL,
    "linalg.pinv.singular": TALL,
    "linalg.qr": TALL,
    "linalg.svd": TALL,
    "linalg.svdvals": TALL,
    "lu_unpack": TALL,
    "masked.amax": LINES,
    "masked.amin": LINES,
    "masked.log_softmax": LINES,
    "masked.logaddexp": LINES,
    "masked.logsumexp": LINES,
    "masked.mean": LINES,
    "masked.norm": LINES,
    "masked.prod": LINES,
    "masked.softmax": LINES,
    "masked.softmin": LINES,
    "masked.std": LINES,
    "masked.sum": LINES,
    "masked.var": LINES,
    "nn.functional.embedding_bag": NUMBERS,
    "nn.functional.gaussian_nll_loss": LINES,
    "nn.functional.linear_cross_entropy.chunked": LINES,
    "nn.functional.linear_cross_entropy.chunked_none": LINES,
    "nn.functional.one_hot": DATA,
    "norm.nuc": TALL,
    "pca_lowrank": TALL,
    "pinverse": TALL,
    "qr": TALL,
    "svd": TALL,
    "svd_lowrank": TALL,
    "tensor_split": LINES,
}
# entries of which no sample may have other sizes along axis 0, in torch itself: the varying column means nothing there
_UNBATCHED = """
    _segment_reduce.lengths _segment_reduce.offsets addbmm allclose arange broadcast_shapes broadcast_to empty
    empty_permuted empty_strided equal eye full item linalg.tensorinv linalg.tensorsolve
    linspace linspace.tensor_overload logspace logspace.tensor_overload native_group_norm
    nn.functional.ctc_loss ones randint randn scalar_tensor
    signal.windows.bartlett signal.windows.blackman signal.windows.cosine signal.windows.exponential
    signal.windows.gaussian signal.windows.general_cosine signal.windows.general_hamming signal.windows.hamming
    signal.windows.hann signal.windows.kaiser signal.windows.nuttall sparse.mm.reduce sparse.sampled_addmm
    tril_indices triu_indices zeros
"""
UNBATCHED = frozenset(_UNBATCHED.split())
# entries that torch itself has no kernel for on the CPU, nor a sample: nothing is asked of them
_NO_CPU = """
    jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary jiterator_binary_return_by_ref
    jiterator_unary nn.functional.batch_norm.without_cudnn torch.ops.aten._efficient_attention_forward
    torch.ops.aten._flash_attention_forward
"""
NO_CPU = frozenset(_NO_CPU.split())

KNOWN: dict[str, dict[str, str]] = {
    "records": RECORDS,
    "replays": REPLAYS,
    "complex": COMPLEX_VALUES,
    "first": FIRST_ORDER,
    "second": SECOND_ORDER,
    "varying": VARYING,
}
