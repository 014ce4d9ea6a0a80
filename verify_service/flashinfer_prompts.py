"""Attention of prompts by flashinfer's kernels, beside Triton's for everything else.

flashinfer is optional, and imported on first use. Its kernels are compiled for one type and head
size; a server never compiles them itself, which takes half a minute.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foredraft.attention.base import MOST_PLANS, Batch, ForwardSizes
from foredraft.attention.paged_triton import TritonAttention
from foredraft.attention.prompts import PromptPlan, PromptsApart
from foredraft.kvcache.paged_kv import PagedKV

_WORKSPACE_BYTES = 16 << 20
_HOPPER = (9, 0)


def why_not(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, is_windowed: bool) -> str:
    """Returns why flashinfer cannot compute prompts of a model on this GPU; empty if it can.

    Args:
        dtype, kv_dtype: Types of queries, and of stored keys and values.
        head_dim: Width of a head.
        is_windowed: Whether some layer has a sliding window.
    """
    if dtype not in (torch.bfloat16, torch.float16) or kv_dtype != dtype:
        return "it takes models and KV caches in bfloat16 or float16 only"
    if is_windowed:
        return "it takes no layers with sliding windows"
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed: pip install 'foredraft[flashinfer]'"
    from flashinfer.jit.attention import gen_batch_prefill_module

    kernel = gen_batch_prefill_module(_kernels(), *_variant(dtype, head_dim))
    if not kernel.is_aot:
        return (
            f"its kernel {kernel.name} is not compiled: pip install flashinfer-jit-cache of the"
            " same version, from https://flashinfer.ai/whl/"
        )
    return ""


def _kernels() -> str:
    """Returns which of flashinfer's two generations of kernels this GPU runs."""
    return "fa3" if torch.cuda.get_device_capability() == _HOPPER else "fa2"


def _variant(dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
    no_encoding, has_window, is_capped, has_short_sums = 0, False, False, False
    sizes = torch.int32, head_dim, head_dim
    return dtype, dtype, dtype, *sizes, no_encoding, has_window, is_capped, has_short_sums


class FlashInferAttention(PromptsApart):
    """Computes prompts by flashinfer, and other sequences and captured steps by Triton."""

    def __init__(self) -> None:
        super().__init__(TritonAttention())
        self._planners: list[_Planner] = []  # the next plan is the first one's

    def partial_bytes(self, sizes: ForwardSizes, device: torch.device) -> int:
        """See AttentionBackend."""
        return super().partial_bytes(sizes, device) + 2 * MOST_PLANS * _WORKSPACE_BYTES

    def _plan_prompts(self, batch: Batch, kv: PagedKV, group_size: int) -> "_Planner":
        spans, device = batch.spans, kv.data.device
        if not self._planners:
            self._planners = [_Planner.on(device) for _ in range(MOST_PLANS)]
        planner = self._planners.pop(0)
        self._planners.append(planner)
        if planner.has_copied is not None:
            # flashinfer writes a plan over the last one, which the GPU may not have copied yet.
            planner.has_copied.synchronize()
        ends = np.cumsum([0] + [span.num_rows for span in spans], dtype=np.int32)
        pages = [span.pages[: -(-span.num_keys // kv.page_size)] for span in spans]
        page_ends = np.cumsum([0] + [len(each) for each in pages], dtype=np.int32)
        last_lengths = [(span.num_keys - 1) % kv.page_size + 1 for span in spans]
        planner.wrapper.plan(
            torch.from_numpy(ends),
            torch.from_numpy(page_ends),
            torch.from_numpy(np.concatenate(pages).astype(np.int32)),
            torch.tensor(last_lengths, dtype=torch.int32),
            kv.num_kv_heads * group_size,
            kv.num_kv_heads,
            kv.data.shape[-1],
            kv.page_size,
            causal=True,
            sm_scale=1.0,
            q_data_type=kv.data.dtype,
            kv_data_type=kv.data.dtype,
            disable_split_kv=True,
        )
        if device.type == "cuda":
            planner.has_copied = torch.cuda.Event()
            planner.has_copied.record()
        return planner

    def _attend_prompts(
        self, plan: PromptPlan, queries: torch.Tensor, layer: int, scale: float, out: torch.Tensor
    ) -> None:
        prompts, rows = queries[plan.first_row :], out[plan.first_row :]
        stored = _pages(plan.kv, plan.kv.keys(layer)), _pages(plan.kv, plan.kv.values(layer))
        wrapper = plan.prompts.wrapper
        wrapper.run(prompts, stored, q_scale=scale, out=rows.view(prompts.shape))


@dataclass(slots=True)
class _Planner:
    """Holds one plan at a time.

    Attributes:
        wrapper: flashinfer's object with the plan.
        has_copied: When the GPU has copied the plan; None before the first one.
    """

    wrapper: Any
    has_copied: torch.cuda.Event | None = None

    @classmethod
    def on(cls, device: torch.device) -> "_Planner":
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return cls(BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=_kernels()))


def _pages(kv: PagedKV, stored: torch.Tensor) -> torch.Tensor:
    """Returns a view [pages, num_kv_heads, page_size, head_dim] of a layer's keys or values."""
    return stored.unflatten(1, (-1, kv.page_size)).transpose(0, 1)
