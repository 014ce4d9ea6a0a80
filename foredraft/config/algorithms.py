"""Declares the draft algorithms: the flags that each takes, and what to expect of its draft before
it has answered.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """Properties of a draft algorithm.

    Attributes:
        has_model: Whether a model drafts. Its tokens cost time, its KV is on the verifier's pages,
            and on a GPU its steps can follow the target's there.
        reads_hidden: Whether that model is a head, which reads the target's hidden states.
        is_block: Whether one forward of it proposes a whole chain.
        needs_files: Whether --speculative-draft-model-path must name the model.
        may_map_tokens: Whether it can draft a part of the vocabulary that a flag names.
        may_have_modules: Whether it may have a module for each depth.
        why_no_steps: Reason why it takes no --speculative-num-steps and --speculative-eagle-topk;
            empty where it takes them.
    """

    has_model: bool = True
    reads_hidden: bool = True
    is_block: bool = False
    needs_files: bool = False
    may_map_tokens: bool = False
    may_have_modules: bool = False
    why_no_steps: str = ""


_MODULES = Algorithm(may_map_tokens=True, may_have_modules=True)
_BLOCK = Algorithm(is_block=True, needs_files=True)

ALGORITHMS = {
    "NONE": Algorithm(has_model=False, reads_hidden=False, why_no_steps="nothing is drafted"),
    "NGRAM": Algorithm(
        has_model=False,
        reads_hidden=False,
        why_no_steps=(
            "--speculative-num-draft-tokens and --speculative-ngram-max-bfs-breadth shape its trees"
        ),
    ),
    "STANDALONE": Algorithm(reads_hidden=False, needs_files=True, may_map_tokens=True),
    "EAGLE": _MODULES,
    "NEXTN": _MODULES,  # another name of EAGLE
    "EAGLE3": Algorithm(needs_files=True),
    "MTP": _MODULES,
    "DFLASH": _BLOCK,
    "DSPARK": _BLOCK,
    "PEAGLE": _BLOCK,
}
