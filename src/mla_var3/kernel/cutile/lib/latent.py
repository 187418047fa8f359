"""What the plans of cuTile kernels for absorbed MLA decode share: sizes, refusals, tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.device import Device
from mla_var3.runtime import KernelPlan, Verdict
from mla_var3.runtime.plan import require_int32

if TYPE_CHECKING:
    import torch

    from mla_var3.problem import MlaProblem

LATENT = 512
ROPE = 64
WIDTH = LATENT + ROPE
LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634

#: Running maximum before any key: finite, so that "maximum minus maximum" is never infinity minus infinity.
FLOOR = -1.0e30


def ceil_pow2(x: int) -> int:
    """The smallest power of two that is at least x (x >= 1)."""
    return 1 << (x - 1).bit_length()


def takes_latents(pd: MlaProblem) -> Verdict:
    """Whether a problem is absorbed decode of the sizes that the kernels are written for, its page left aside."""
    if (pd.k, pd.p) != (LATENT, ROPE):
        return Verdict.no(f"written for latent 512 and rope 64; the problem has k = {pd.k}, p = {pd.p}.")
    if pd.n:
        return Verdict.no(f"attends to latent tokens only; the problem keeps n = {pd.n} decompressed ones.")
    if pd.b * pd.s * pd.h * LATENT >= 2**31:
        return Verdict.no(
            f"b · s · h = {pd.b * pd.s * pd.h} query rows: output offsets are 32 bits, use under 4194304."
        )
    return Verdict.yes()


def takes_pages_of_16(pd: MlaProblem) -> Verdict:
    """`takes_latents`, in pages of 16, 32, 64, … tokens."""
    page = pd.page_size
    if page & (page - 1) or page < 16:
        return Verdict.no(f"pages of {page} tokens: cuTile tiles are powers of two, use pages of 16, 32, 64, …")
    return takes_latents(pd)


class LatentPlan(KernelPlan):
    """Tiles of query rows, splits and output tensors of a decode kernel; kernels are the version's."""

    # ------------------------------------------------------------ the version's
    def tile_rows(self) -> int:
        """Query rows of a tile."""
        return int(self.tiling.tile_m)

    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return int(self.tiling.tile_n)

    def choose_splits(self, blocks: int, tiles: int, sms: int) -> int:
        """Parts to split each request's tokens into, where the tiling does not say."""
        raise NotImplementedError

    # ------------------------------------------------------------ sizes
    def row_shape(self) -> tuple[int, int]:
        """(query tokens, heads of the group) of a tile of rows."""
        tg = min(self.tile_rows(), ceil_pow2(self.problem.group))
        return self.tile_rows() // tg, tg

    def row_tiles(self) -> int:
        """Tiles of query rows of one request, over all latent caches."""
        ts, tg = self.row_shape()
        pd = self.problem
        return -(-pd.s // ts) * -(-pd.group // tg) * pd.h_kv

    def num_splits(self, b: int, max_pages: int) -> int:
        """Splits of the bound kernel: the tiling's, or the model's for these sizes; lengths are not looked at."""
        tiles = max_pages * self.problem.page_size // self.tile_tokens()
        if self.tiling.num_splits:
            return min(int(self.tiling.num_splits), max(tiles, 1))
        device = self.device or Device.detect()
        return self.choose_splits(b * self.row_tiles(), tiles, device.num_sms if device is not None else 132)

    # ------------------------------------------------------------ tensors
    def bound_splits(self, inputs: tuple[Any, ...]) -> int:
        """The splits for these inputs; refuses tables and lengths that are not int32."""
        q, _, page_table, seq_lens = inputs
        require_int32(page_table=page_table, seq_lens=seq_lens)
        return self.num_splits(q.shape[0], page_table.shape[1])

    def whole(self, b: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out (b, s, h, 512) and lse (b, h, s), uninitialised."""
        import torch

        pd = self.problem
        out = torch.empty((b, pd.s, pd.h, LATENT), dtype=like.dtype, device=like.device)
        return out, torch.empty((b, pd.h, pd.s), dtype=torch.float32, device=like.device)

    def row_parts(self, b: int, splits: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial results row by row: o_part (b, splits, s, h, 512) and lse_part (b, splits, s, h), uninitialised."""
        import torch

        shape = (b, splits, self.problem.s, self.problem.h)
        o_part = torch.empty((*shape, LATENT), dtype=torch.float32, device=like.device)
        return o_part, torch.empty(shape, dtype=torch.float32, device=like.device)
