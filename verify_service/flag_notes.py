"""Notes for the log on flags that change the text, or change nothing."""

import logging

from foredraft.config.services import VerifyConfig
from verify_service.executor.choice.sampler import Thresholds

logger = logging.getLogger(__name__)


def note_flags(config: VerifyConfig) -> None:
    """Logs which flags change the text, and which change nothing."""
    thresholds = thresholds_of(config)
    if thresholds.lossy:
        logger.warning(
            "LOSSY: --speculative-accept-threshold-single %g and --speculative-accept-threshold-acc"
            " %g let drafts change the text",
            thresholds.single,
            thresholds.acc,
        )
    if config.simulate_accept_length is not None:
        logger.warning("acceptance is simulated: the text is meaningless")
    if config.enable_torch_compile or config.torch_compile_max_bs is not None:
        logger.info(
            "--enable-torch-compile and --torch-compile-max-bs change nothing: on a GPU, steps are"
            " captured as CUDA graphs with fused kernels anyway; --cuda-graph-max-bs bounds them"
        )
    if config.speculative_attention_mode != "prefill":
        logger.info(
            "--speculative-attention-mode changes nothing: one attention backend computes prompts"
            " and verifies drafts"
        )


def thresholds_of(config: VerifyConfig) -> Thresholds:
    """Returns the thresholds of acceptance; lossy ones let drafts change the text."""
    return Thresholds(
        config.speculative_accept_threshold_single, config.speculative_accept_threshold_acc
    )
