"""A draft's step on the device: committed tokens in, KV extended, trees out.

Everything has a fixed shape: B sequences, R committed tokens each at most, S levels of K beams,
padded. Lengths, pages, tokens and trees stay on the device, so that a CUDA graph can hold each of
the step's two parts. The same code runs operation by operation on any device.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draft_service.steps.batches import DraftBatches
from draft_service.steps.hand_on import HandedOn
from draft_service.steps.operations import Beams, StepOperations
from draft_service.steps.outcomes import Outcomes
from draft_service.steps.plan import DraftPlan, PlanInputs
from draft_service.steps.records import DraftShape
from draft_service.steps.uploads import Uploads
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.trees.tree_building import Ordering


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What one attach asks of its draft's steps.

    Attributes:
        shape: Sizes of the steps and their trees.
        ordering: Order of a node's children.
        max_batch: Maximum number of sequences of a step.
        handed_on: Device memory of steps whose tokens do not come from the host; None without such
            steps.
    """

    shape: DraftShape
    ordering: Ordering
    max_batch: int
    handed_on: HandedOn | None = None


class SamplingMode(NamedTuple):
    """How much of the sampling rule the drafts of a step follow.

    Attributes:
        any_sampled: Whether a sequence has a temperature above 0.
        any_ranked: Whether such a one has a top-k or top-p.
    """

    any_sampled: bool
    any_ranked: bool


class DraftStep(ABC):
    """The two parts of the steps of one draft over one cache: `extend`, then `draft`.

    A sequence's drafted tokens write their KV behind its committed keys: into the rest of their
    last page, which belongs to the sequence, and then into scratch pages of its slot. Padding has a
    slot of its own.

    Args:
        kv: Cache of the draft, with scratch pages for every slot, and for one more slot.
        options: What the attach asks for.
        token_map: int64 [V], target ids of the logits' columns; None where columns equal ids.
        planned: Sizes that drafted tokens are planned with, where these are not those of the trees.

    Attributes:
        kv: The argument of this name.
        shape: Sizes of the steps and their trees.
        max_batch: Maximum number of sequences of a step.
        device: Device of the steps.
        operations: Operations beside the model's forward.
        uploads: The host's records, and the page tables.
        inputs: What plans are filled in from, beside the records.
        results: int32 [max_batch, 2, N], tokens and parents of the newest trees, see
            `StaticBeams.nodes`.
        has_blocks: Whether the levels of a plan are rows of one block.
        outcomes: What `look_ahead` prepares for; None for steps without it.
    """

    has_blocks = False
    outcomes: Outcomes | None = None

    def __init__(
        self,
        kv: PagedKV,
        options: StepOptions,
        token_map: torch.Tensor | None,
        planned: DraftShape | None = None,
    ) -> None:
        shape, max_batch, device = options.shape, options.max_batch, kv.data.device
        self.kv, self.shape, self.max_batch, self.device = kv, shape, max_batch, device
        self._planned, self._token_map = planned or shape, token_map
        self._is_coupled = options.ordering == "coupled"
        self.operations = StepOperations(shape, options.ordering, device)
        handed_on = options.handed_on or HandedOn.nowhere(shape, device)
        # Blocks for a step and the previous one, each in as many parts as needed.
        num_blocks = 2 * -(-shape.max_slots // max_batch)
        self.uploads = Uploads(shape, max_batch, handed_on.spare_row, num_blocks, device)
        num_keys = torch.zeros(shape.max_slots + 1, dtype=torch.int32, device=device)
        scratch_pages = self._planned.scratch_pages(kv.page_size)
        dump_slot = (kv.num_pages + shape.max_slots * scratch_pages) * kv.page_size
        self.inputs = PlanInputs(self.uploads.tables, num_keys, handed_on, dump_slot)
        self._batches: dict[int, DraftBatches] = {}  # by batch size
        self.results = torch.zeros(max_batch, 2, shape.num_nodes, dtype=torch.int32, device=device)

    def mode(self, any_sampled: bool, any_ranked: bool) -> SamplingMode:
        """Returns the mode of a step; only coupled drafts follow the sampling rule."""
        is_sampled = any_sampled and self._is_coupled
        return SamplingMode(is_sampled, is_sampled and any_ranked)

    @abstractmethod
    def extend(self, batch: int) -> None:
        """Computes the KV of the uploaded records' tokens, and what the roots of their trees need.

        Args:
            batch: Number of sequences, padding included.
        """

    def take_roots(
        self, batch: int, logits: torch.Tensor | None, features: torch.Tensor | None
    ) -> None:
        """Plans a step whose tokens were computed outside, instead of `extend`.

        Args:
            batch: Number of sequences, padding included.
            logits: [n, V], of the sequences' last tokens; None where no logits are needed.
            features: [n, H], of the sequences' last tokens; None where no features are needed.
        """
        self.prepare(batch)

    def draft(self, batch: int, mode: SamplingMode) -> None:
        """Drafts the trees that continue the roots; writes them for the host, and for a verifier on
        the same device.
        """
        batches = self.batches_of(batch)
        beams = self.operations.beams(batch, batches.sampling(*mode))
        self.grow(batch, batches, beams)
        beams.write(self.results[:batch])
        self.hand_on(batch)

    def hand_on(self, batch: int) -> None:
        """Copies the newest trees to where a verifier on the same device reads them."""
        records, trees = self.uploads.on_device(batch), self.inputs.handed_on.trees
        self.operations.hand_on_trees(records, self.results[:batch], trees)

    def look_ahead(self, batch: int, mode: SamplingMode) -> None:
        """Prepares for the outcomes of a step that verifies the newest trees.

        Args:
            batch: Number of sequences, padding included; at most `outcomes.max_batch`.
            mode: See `draft`.
        """
        raise NotImplementedError

    @abstractmethod
    def grow(self, batch: int, batches: DraftBatches, beams: Beams) -> None:
        """Grows all levels of the trees.

        Args:
            batch: Number of sequences, padding included.
            batches: The step's batches.
            beams: Beams at the roots.
        """

    def prepare(self, batch: int) -> DraftBatches:
        """Does a step's first work: updates page tables, and fills in the plan."""
        batches, uploads = self.batches_of(batch), self.uploads
        self.operations.apply_updates(uploads.updates, uploads.tables)
        records = uploads.on_device(batch)
        self.operations.fill(batches.plan, self._planned, self.kv, records, self.inputs)
        return batches

    def batches_of(self, batch: int) -> DraftBatches:
        """Returns the batches of a size.

        They are made when a size first runs, which is before it is captured: graphs hold addresses.
        """
        if batch not in self._batches:
            plan = DraftPlan.empty(self._planned, self.kv, batch)
            self._batches[batch] = DraftBatches(plan, self._planned, self.kv, self.has_blocks)
        return self._batches[batch]

    def drop_batches(self) -> None:
        """Drops the batches of all sizes, before any is captured."""
        self._batches.clear()
