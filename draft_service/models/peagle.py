"""P-EAGLE (Amazon 2026, arXiv 2602.01469): EAGLE-3 layers that read mask rows and so propose many
tokens in one forward.
"""

import torch

from draft_service.models.draft_head import HeadSpec
from draft_service.models.eagle3 import Eagle3Head
from foredraft.layers.parameters import Target, new_parameter


class PEagleHead(Eagle3Head):
    """EAGLE-3 whose rows after the newest token stand for tokens still to be drafted.

    Such a row reads the mask token's embedding and a feature of its own.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        config = spec.config
        assert config.mask_token_id is not None
        self.mask_token_id: int = config.mask_token_id
        # Replaces the target's hidden states, before fc and its norms.
        self.mask_hidden = new_parameter((1, 1, self.hidden_width), spec.dtype, spec.device)

    def targets(self) -> dict[str, Target]:
        """See DraftHead."""
        return super().targets() | {"mask_hidden": Target.whole(self.mask_hidden)}

    def mask_feature(self) -> torch.Tensor:
        """Returns the feature of a mask row, [1, hidden_size]."""
        return self.fuse(self.mask_hidden.view(1, -1))
