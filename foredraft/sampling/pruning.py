"""The sampling rule without evaluating the noise for every token: an exact shortcut for large
vocabularies on a CPU.

Noise is bounded, so a token whose score cannot reach the best perturbed score found so far even
with the largest noise is never looked at; of the others most are discarded by their hash alone,
before any logarithm. Rows are cut into blocks whose maxima say which parts of a row can matter.
Results equal the dense rule of `sampling` bit for bit.
"""

import math

import torch

from foredraft.sampling.filters import log_min_p, ranked_keep, relative, total_mass
from foredraft.sampling.noise import MAX_GUMBEL, gumbel_of_hash, hash_tokens, row_keys
from foredraft.sampling.rows import SamplingRows

BLOCK = 256
_FIRST_BLOCKS = 8  # looked at in full to find a good lower bound
_CHUNK = 512  # (row, block) pairs hashed at once: 512 KiB of int32, about a core's L2 cache
_MARGIN = 1e-3  # far above the rounding of a score
_FEW = 1024  # ranked tokens that usually hold what top-k and top-p keep
_TOP_P_DEPTHS = (6.0, 9.0, 12.0, 16.0, 24.0)


def perturbed_top(
    logits: torch.Tensor,
    rows: SamplingRows,
    k: int,
    token_map: torch.Tensor | None = None,
    best: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sampling.perturbed_top`."""
    view = _Blocks(logits, rows, token_map, best)
    if not rows.any_ranked:
        return _top_unranked(view, k)
    is_ranked = (rows.top_k > 0) | (rows.top_p < 1)
    columns = torch.zeros((len(rows), k), dtype=torch.int64)
    scores = torch.full((len(rows), k), -math.inf)
    for part, top in ((is_ranked, _top_ranked), (~is_ranked, _top_unranked)):
        if bool(part.any()):
            columns[part], scores[part] = top(view.take(part), k)
    return columns, scores


class _Blocks:
    """Cuts rows of logits into blocks, and computes their maxima."""

    def __init__(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        token_map: torch.Tensor | None,
        best: torch.Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.token_map = token_map
        self.num_rows, self.vocab = logits.shape
        if self.vocab % BLOCK:
            padded = logits.new_full((self.num_rows, -(-self.vocab // BLOCK) * BLOCK), -math.inf)
            padded[:, : self.vocab] = logits
            logits = padded
        self.blocks = logits.reshape(self.num_rows, -1, BLOCK)
        maxima = self.blocks.amax(-1)
        self.best = maxima.amax(-1) if best is None else best
        self.maxima = relative(maxima, self.best[:, None], rows.temperature[:, None])
        self.keys = row_keys(rows.seed, rows.position)
        self.floor = log_min_p(rows)
        self.token_ids = None
        if token_map is not None:
            self.token_ids = torch.zeros(self.blocks.shape[1] * BLOCK, dtype=torch.int32)
            self.token_ids[: self.vocab] = token_map.to(torch.int32)

    @property
    def flat(self) -> torch.Tensor:
        """Logits padded with minus infinity to whole blocks."""
        return self.blocks.reshape(self.num_rows, -1)

    def take(self, part: torch.Tensor) -> "_Blocks":
        """Selects the rows that `part`, bool [R], marks."""
        if bool(part.all()):
            return self
        flat, best = self.flat[part, : self.vocab], self.best[part]
        return _Blocks(flat, self.rows.take(part), self.token_map, best)

    def columns(self, block: torch.Tensor) -> torch.Tensor:
        """Returns the columns of blocks, int64 [P] -> int64 [P, BLOCK]."""
        return block[:, None] * BLOCK + torch.arange(BLOCK)

    def scores(self, row: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Computes tempered scores of (row, block) pairs, float32 [P, BLOCK]."""
        return relative(
            self.blocks[row, block], self.best[row, None], self.rows.temperature[row, None]
        )

    def hashes(self, row: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Hashes rows and columns for the noise, int64 [P], int64 [P, C] -> int32 [P, C]."""
        tokens = columns.to(torch.int32) if self.token_ids is None else self.token_ids[columns]
        return hash_tokens(self.keys[0][row, None], self.keys[1][row, None], tokens)


def _pack(
    row: torch.Tensor, values: tuple[torch.Tensor, ...], fills: tuple[float, ...], num_rows: int
) -> list[torch.Tensor]:
    """Packs ragged entries, ordered by row, into padded [num_rows, C] tensors."""
    counts = torch.bincount(row, minlength=num_rows)
    width = max(1, int(counts.max()))
    slot = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    packed = []
    for value, fill in zip(values, fills, strict=True):
        out = torch.full((num_rows, width), fill, dtype=value.dtype)
        out[row, slot] = value
        packed.append(out)
    return packed


def _best(columns: torch.Tensor, scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k best of each row; of equal scores the lowest column comes first."""
    if columns.shape[1] < k:
        pad = k - columns.shape[1]
        columns = torch.nn.functional.pad(columns, (0, pad))
        scores = torch.nn.functional.pad(scores, (0, pad), value=-math.inf)
    if k == 1:
        top = scores.amax(-1, keepdim=True)
        last = torch.iinfo(torch.int64).max
        first = torch.where(scores == top, columns, last).amin(-1, keepdim=True)
        return torch.where(top == -math.inf, 0, first), top
    columns, order = columns.sort(dim=-1, stable=True)
    scores, order = scores.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return columns.gather(-1, order)[:, :k], scores[:, :k]


def _top_unranked(view: _Blocks, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the k best tokens of rows without top-k and top-p; min-p alone is a threshold."""
    num_rows, num_blocks = view.maxima.shape
    num_first = min(num_blocks, max(_FIRST_BLOCKS, k))
    first = view.maxima.topk(num_first, dim=-1).indices
    row = torch.arange(num_rows).repeat_interleave(num_first)
    block = first.flatten()
    columns = view.columns(block)
    tempered = view.scores(row, block)
    scores = tempered + gumbel_of_hash(view.hashes(row, columns))
    scores.masked_fill_(tempered < view.floor[row, None], -math.inf)
    columns, scores = columns.view(num_rows, -1), scores.view(num_rows, -1)
    bound = scores.topk(k, dim=-1).values[:, -1]  # no worse score can be among the k best

    rest = view.maxima.scatter(-1, first, -math.inf)
    limit = torch.maximum(bound - MAX_GUMBEL - _MARGIN, view.floor)
    rest_row, rest_block = (
        (rest >= limit[:, None]).logical_and_(rest > -math.inf).nonzero().unbind(-1)
    )
    # A token needs g >= bound - score, and g <= -log(w), so w, and with it the hash, must be small
    # enough.
    need = (bound[rest_row] - _MARGIN - rest[rest_row, rest_block]).to(torch.float64)
    largest = ((-need).exp() * 2.0**32).clamp_max_(2.0**32 - 1).to(torch.int64) - 2**31
    largest = largest.to(torch.int32)
    found_row, found_column = [], []
    for begin in range(0, len(rest_row), _CHUNK):
        row, block = rest_row[begin : begin + _CHUNK], rest_block[begin : begin + _CHUNK]
        # Signed order equals unsigned order then.
        ordered = view.hashes(row, view.columns(block)).bitwise_xor_(-(2**31))
        pair, inside = (ordered <= largest[begin : begin + _CHUNK, None]).nonzero().unbind(-1)
        found_row.append(row[pair])
        found_column.append(block[pair] * BLOCK + inside)
    if found_row:
        row, column = torch.cat(found_row), torch.cat(found_column)
        block, inside = column // BLOCK, column % BLOCK
        tempered = relative(
            view.blocks[row, block, inside], view.best[row], view.rows.temperature[row]
        )
        late = tempered + gumbel_of_hash(view.hashes(row, column[:, None])[:, 0])
        late.masked_fill_(tempered < view.floor[row], -math.inf)
        more = _pack(row, (column, late), (0, -math.inf), num_rows)
        columns = torch.cat([columns, more[0]], -1)
        scores = torch.cat([scores, more[1]], -1)
    return _best(columns, scores, k)


def _top_ranked(view: _Blocks, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the k best tokens of rows with top-k or top-p.

    Few tokens can be kept, so they are found, sorted and perturbed.
    """
    rows = view.rows
    limited = rows.top_k > 0
    if bool(limited.all()):  # the whole row's mass is not needed then
        num_few = 2 * int(rows.top_k.max())
        mass, total = view.flat, torch.ones(view.num_rows, dtype=torch.float64)
    else:
        num_few = _FEW
        mass = relative(view.flat, view.best[:, None], rows.temperature[:, None]).exp_()
        total = total_mass(mass)
    few = view.flat.topk(min(num_few, _FEW, view.vocab), dim=-1).indices.sort(dim=-1).values
    tempered = relative(view.flat.gather(-1, few), view.best[:, None], rows.temperature[:, None])
    tempered, order = tempered.sort(dim=-1, descending=True, stable=True)
    few = few.gather(-1, order)
    # Complete if what is kept ends before the last of the few: then no equal of a kept token lies
    # outside.
    through = tempered.exp().to(torch.float64).cumsum(-1)
    enough = through >= rows.top_p.to(torch.float64)[:, None] * total[:, None] * (1 + 1e-6)
    last = torch.where(limited, rows.top_k - 1, (~enough).sum(-1))
    width = few.shape[1]
    bounded = tempered.gather(-1, last.clamp_max(width - 1)[:, None])[:, 0] > tempered[:, -1]
    complete = (last < width) & bounded
    if bool(complete.all()):
        return _choose_ranked(view, few, tempered, total, k)
    columns = torch.zeros((view.num_rows, k), dtype=torch.int64)
    scores = torch.full((view.num_rows, k), -math.inf)
    if bool(complete.any()):
        columns[complete], scores[complete] = _choose_ranked(
            view.take(complete), few[complete], tempered[complete], total[complete], k
        )
    rest = view.take(~complete)
    many, tempered = _ranked_many(rest, mass[~complete], total[~complete])
    columns[~complete], scores[~complete] = _choose_ranked(
        rest, many, tempered, total[~complete], k
    )
    return columns, scores


def _choose_ranked(
    view: _Blocks, columns: torch.Tensor, tempered: torch.Tensor, total: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filters and perturbs ranked candidates, [R, C] each."""
    keep = ranked_keep(tempered, total, view.rows) & (tempered >= view.floor[:, None])
    width = int(keep.sum(-1).max())
    columns, tempered, keep = columns[:, :width], tempered[:, :width], keep[:, :width]
    scores = tempered + gumbel_of_hash(view.hashes(torch.arange(view.num_rows), columns))
    return _best(columns, scores.masked_fill_(~keep, -math.inf), k)


def _ranked_many(
    view: _Blocks, mass: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns columns [R, C] and tempered scores [R, C] of every token that can be kept, best
    first.
    """
    least = _least_kept(view, mass, total)
    row, block = (view.maxima >= least[:, None]).nonzero().unbind(-1)
    tempered = view.scores(row, block)
    pair, inside = (tempered >= least[row, None]).nonzero().unbind(-1)
    columns, tempered = _pack(
        row[pair],
        (block[pair] * BLOCK + inside, tempered[pair, inside]),
        (0, -math.inf),
        view.num_rows,
    )
    tempered, order = tempered.sort(dim=-1, descending=True, stable=True)
    return columns.gather(-1, order), tempered


def _least_kept(view: _Blocks, mass: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Returns a tempered score that no kept token is below, float32 [R]."""
    rows = view.rows
    limited = rows.top_k > 0
    lowest = torch.finfo(torch.float32).min
    least = torch.full((view.num_rows,), lowest)
    if bool(limited.any()):
        top_k = rows.top_k[limited].clamp_max(view.vocab)
        top = view.flat[limited].topk(int(top_k.max()), dim=-1).values
        values = top.gather(-1, top_k[:, None] - 1)[:, 0]
        temperature = rows.temperature[limited]
        least[limited] = relative(values, view.best[limited], temperature).clamp_min_(lowest)
    need = rows.top_p.to(torch.float64) * total * (1 + 1e-6)
    pending = ~limited
    # Deeper and deeper below the best token, until what lies above holds the nucleus.
    for depth in _TOP_P_DEPTHS:
        if not bool(pending.any()):
            break
        share = math.exp(-depth) * (1 + 1e-5)
        above = total_mass(mass[pending].mul_(mass[pending] >= share))
        enough = pending.clone()
        enough[pending] = above >= need[pending]
        least[enough] = -depth
        pending &= ~enough
    return least
