"""Another machine on this one: the last bit of what torch computes is another.

Matrix products, attention, reductions, decompositions and transcendental functions are rounded differently by every
CPU and library. A test that leans on how this machine rounds fails under `make test-shaken`, where each of their
results is multiplied by 1 + r·ε, r of −1, 0 or 1 for each number. Like a machine, a seed is consistent: the same
operation on tensors of the same shapes and strides is rounded in the same way, so that what is computed twice is equal
to the last bit, and what is computed in two ways is not. Whole numbers stay: a count is exact on every machine.
"""

from __future__ import annotations

import zlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# by the name in torch.ops.aten; what is exact on every machine (copies, max, comparisons, one addition) is not here
SHAKEN = frozenset(
    """
    mm bmm addmm baddbmm addmv addr mv dot vdot linear matmul einsum convolution native_batch_norm
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_attention_math scaled_dot_product_attention _scaled_dot_product_fused_attention_overrideable
    sum mean var std var_mean std_mean norm linalg_vector_norm prod cumsum cumprod nansum
    logsumexp logcumsumexp _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward rms_norm
    _linalg_eigh linalg_eig _linalg_eigvals linalg_eigvals _linalg_svd linalg_qr linalg_cholesky_ex
    _linalg_solve_ex linalg_solve_triangular linalg_inv_ex _linalg_det linalg_lu_factor_ex linalg_matrix_exp
    nll_loss_forward embedding_dense_backward index_add scatter_add
    exp exp2 expm1 log log2 log10 log1p tanh sigmoid sin cos erf erfc rsqrt pow gelu gelu_backward silu silu_backward
    """.split()  # noqa: SIM905 - names, in lines of what belongs together
)

_NOISE = 2**16


class Shaker(TorchDispatchMode):
    """While it is entered, in this thread: below autograd, so that backward passes are shaken too."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._tables: dict[torch.dtype, torch.Tensor] = {}  # of factors, entered at a place that depends on the call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__.removesuffix("_")  # in place too
        if name in SHAKEN:
            layout = [(x.shape, x.stride()) for x in args if isinstance(x, torch.Tensor)]
            for number, one in enumerate(found if isinstance(found, tuple | list) else (found,)):
                if isinstance(one, torch.Tensor) and one.numel() and one.device.type == "cpu":
                    self._shake(one, zlib.crc32(f"{name} {number} {layout}".encode(), self._seed) % _NOISE)
        return found

    def _shake(self, found: torch.Tensor, start: int) -> None:
        if found.is_complex():
            found = torch.view_as_real(found.resolve_conj())
        if found.is_floating_point() and found.dtype.itemsize > 1:
            found.mul_(self._factors(found, start).where(found != found.trunc(), 1))

    def _factors(self, like: torch.Tensor, start: int) -> torch.Tensor:
        """1 + r·ε for each number."""
        if like.dtype not in self._tables:
            r = torch.randint(-1, 2, (2 * _NOISE,), generator=torch.Generator().manual_seed(self._seed))
            self._tables[like.dtype] = 1 + r.to(like.dtype) * torch.finfo(like.dtype).eps
        here = self._tables[like.dtype][start : start + _NOISE]
        count = like.numel()
        return (here if count <= _NOISE else here.repeat(-(-count // _NOISE)))[:count].view(like.shape)
