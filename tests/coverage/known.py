"""What does not pass yet, column by column, and why. One line an entry, so that mending one takes out one line.

Every row is proved by test_opinfo.py: an entry that is listed and passes fails the tests, as does one that fails and is
not listed. After a change: `make page`.
"""

from __future__ import annotations

TORCH_OF_PAGE = "2.13.0"  # the torch whose entries these are

NO_CPU = "torch has no kernel for the CPU"
SPARSE = "sparse layout: a recorded value is a dense tensor"
COMPLEX = "no gradient through complex tensors yet"
TORCH = "torch's own gradient is wrong or NaN there"
NO_RULE = "no rule yet: NoGradient says how to register one"
RESHAPED = "a handle reshaped in place keeps its old shape"

RECORDS: dict[str, str] = {
    "jiterator_2inputs_2outputs": NO_CPU,
    "jiterator_4inputs_with_extra_args": NO_CPU,
    "jiterator_binary": NO_CPU,
    "jiterator_binary_return_by_ref": NO_CPU,
    "jiterator_unary": NO_CPU,
    "nn.functional.batch_norm.without_cudnn": NO_CPU,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "torch.ops.aten._efficient_attention_forward": NO_CPU,
    "torch.ops.aten._flash_attention_forward": NO_CPU,
}
REPLAYS: dict[str, str] = {}
COMPLEX_VALUES: dict[str, str] = {}
FIRST_ORDER: dict[str, str] = {
    "_segment_reduce.lengths": NO_RULE,
    "_segment_reduce.offsets": NO_RULE,
    "as_strided_scatter": TORCH,
    "cdouble": COMPLEX,
    "cfloat": COMPLEX,
    "chalf": COMPLEX,
    "cholesky_inverse": TORCH,
    "cholesky_solve": TORCH,
    "complex": COMPLEX,
    "fft.fft": COMPLEX,
    "fft.fft2": COMPLEX,
    "fft.fftn": COMPLEX,
    "fft.hfft": COMPLEX,
    "fft.hfft2": COMPLEX,
    "fft.hfftn": COMPLEX,
    "fft.ifft": COMPLEX,
    "fft.ifft2": COMPLEX,
    "fft.ifftn": COMPLEX,
    "fft.ihfft": COMPLEX,
    "fft.ihfft2": COMPLEX,
    "fft.ihfftn": COMPLEX,
    "fft.irfft": COMPLEX,
    "fft.irfft2": COMPLEX,
    "fft.irfftn": COMPLEX,
    "fft.rfft": COMPLEX,
    "fft.rfft2": COMPLEX,
    "fft.rfftn": COMPLEX,
    "imag": COMPLEX,
    "istft": COMPLEX,
    "linalg.eigvals": COMPLEX,
    "linalg.householder_product": NO_RULE,
    "linalg.lstsq": NO_RULE,
    "linalg.lstsq.grad_oriented": NO_RULE,
    "linalg.lu": NO_RULE,
    "linalg.lu_factor": NO_RULE,
    "linalg.lu_factor_ex": NO_RULE,
    "linalg.lu_solve": NO_RULE,
    "lu": NO_RULE,
    "lu_solve": NO_RULE,
    "lu_unpack": NO_RULE,
    "nanquantile": RESHAPED,
    "nn.functional.linear_cross_entropy.chunked": "the gradient is not torch's for some samples",
    "ormqr": NO_RULE,
    "polar": COMPLEX,
    "quantile": RESHAPED,
    "stft": RESHAPED,
    "to_sparse": SPARSE,
    "view_as_complex": COMPLEX,
    "view_as_real": COMPLEX,
}
SECOND_ORDER: dict[str, str] = {
    "grid_sampler_2d": NO_RULE,
    "grid_sampler_3d": NO_RULE,
    "linalg.norm.subgradients_at_zero": TORCH,
    "masked.logaddexp": TORCH,
    "nn.functional.grid_sample": NO_RULE,
    "nn.functional.rrelu": NO_RULE,
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
