from foredraft.api.tensor.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProposalShape(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROPOSAL_SHAPE_UNSPECIFIED: _ClassVar[ProposalShape]
    PROPOSAL_SHAPE_CHAINS: _ClassVar[ProposalShape]
    PROPOSAL_SHAPE_TREES: _ClassVar[ProposalShape]
    PROPOSAL_SHAPE_BLOCKS: _ClassVar[ProposalShape]

class DraftCost(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_COST_UNSPECIFIED: _ClassVar[DraftCost]
    DRAFT_COST_FREE: _ClassVar[DraftCost]
    DRAFT_COST_PER_PROPOSAL: _ClassVar[DraftCost]
    DRAFT_COST_PER_LEVEL: _ClassVar[DraftCost]
PROPOSAL_SHAPE_UNSPECIFIED: ProposalShape
PROPOSAL_SHAPE_CHAINS: ProposalShape
PROPOSAL_SHAPE_TREES: ProposalShape
PROPOSAL_SHAPE_BLOCKS: ProposalShape
DRAFT_COST_UNSPECIFIED: DraftCost
DRAFT_COST_FREE: DraftCost
DRAFT_COST_PER_PROPOSAL: DraftCost
DRAFT_COST_PER_LEVEL: DraftCost

class GetDraftInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftInfoResponse(_message.Message):
    __slots__ = ("algorithm", "model", "kv_bytes_per_token", "weight_bytes", "hidden", "transports", "limits", "vocab_size", "tokenizer_fingerprint", "uses_pages", "version", "device_uuid", "process", "shared_weights", "shared_weight_bytes", "bytes_per_sequence", "workspace_bytes", "device_steps", "protocol", "checksum", "quantization", "trained_for", "fusion", "proposes", "cost")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    USES_PAGES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SHARED_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_STEPS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FOR_FIELD_NUMBER: _ClassVar[int]
    FUSION_FIELD_NUMBER: _ClassVar[int]
    PROPOSES_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    model: str
    kv_bytes_per_token: int
    weight_bytes: int
    hidden: HiddenNeeds
    transports: _containers.RepeatedScalarFieldContainer[_tensor_pb2.Transport]
    limits: TreeLimits
    vocab_size: int
    tokenizer_fingerprint: str
    uses_pages: bool
    version: str
    device_uuid: str
    process: _tensor_pb2.Process
    shared_weights: _containers.RepeatedScalarFieldContainer[str]
    shared_weight_bytes: int
    bytes_per_sequence: int
    workspace_bytes: int
    device_steps: bool
    protocol: int
    checksum: str
    quantization: str
    trained_for: str
    fusion: Fusion
    proposes: ProposalShape
    cost: DraftCost
    def __init__(self, algorithm: _Optional[str] = ..., model: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., hidden: _Optional[_Union[HiddenNeeds, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[_tensor_pb2.Transport, str]]] = ..., limits: _Optional[_Union[TreeLimits, _Mapping]] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., uses_pages: bool = ..., version: _Optional[str] = ..., device_uuid: _Optional[str] = ..., process: _Optional[_Union[_tensor_pb2.Process, _Mapping]] = ..., shared_weights: _Optional[_Iterable[str]] = ..., shared_weight_bytes: _Optional[int] = ..., bytes_per_sequence: _Optional[int] = ..., workspace_bytes: _Optional[int] = ..., device_steps: bool = ..., protocol: _Optional[int] = ..., checksum: _Optional[str] = ..., quantization: _Optional[str] = ..., trained_for: _Optional[str] = ..., fusion: _Optional[_Union[Fusion, _Mapping]] = ..., proposes: _Optional[_Union[ProposalShape, str]] = ..., cost: _Optional[_Union[DraftCost, str]] = ...) -> None: ...

class Fusion(_message.Message):
    __slots__ = ("width", "num_stream_norms", "normalizes_input", "has_bias", "normalizes_output", "epsilon")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAM_NORMS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZES_INPUT_FIELD_NUMBER: _ClassVar[int]
    HAS_BIAS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZES_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    width: int
    num_stream_norms: int
    normalizes_input: bool
    has_bias: bool
    normalizes_output: bool
    epsilon: float
    def __init__(self, width: _Optional[int] = ..., num_stream_norms: _Optional[int] = ..., normalizes_input: bool = ..., has_bias: bool = ..., normalizes_output: bool = ..., epsilon: _Optional[float] = ...) -> None: ...

class GetFusionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFusionResponse(_message.Message):
    __slots__ = ("name", "first_row", "rows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    first_row: int
    rows: _tensor_pb2.Tensor
    def __init__(self, name: _Optional[str] = ..., first_row: _Optional[int] = ..., rows: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class HiddenNeeds(_message.Message):
    __slots__ = ("layers", "width", "dtype")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    width: int
    dtype: _tensor_pb2.DataType
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ...) -> None: ...

class TreeLimits(_message.Message):
    __slots__ = ("num_steps", "topk", "num_draft_tokens")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOPK_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    topk: int
    num_draft_tokens: int
    def __init__(self, num_steps: _Optional[int] = ..., topk: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ...) -> None: ...

class SpeculateRequest(_message.Message):
    __slots__ = ("attach", "step")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    attach: AttachRequest
    step: StepRequest
    def __init__(self, attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., step: _Optional[_Union[StepRequest, _Mapping]] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("attach", "step")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    attach: AttachResponse
    step: StepResponse
    def __init__(self, attach: _Optional[_Union[AttachResponse, _Mapping]] = ..., step: _Optional[_Union[StepResponse, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("epoch", "target_fingerprint", "architecture", "hidden_size", "num_layers", "vocab_size", "tokenizer_fingerprint", "page_size", "num_pages", "max_batch", "max_context", "limits", "draft_sampling", "arena", "weights", "protocol", "fused")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FUSED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    target_fingerprint: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tokenizer_fingerprint: str
    page_size: int
    num_pages: int
    max_batch: int
    max_context: int
    limits: TreeLimits
    draft_sampling: str
    arena: _tensor_pb2.Arena
    weights: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Arena]
    protocol: int
    fused: bool
    def __init__(self, epoch: _Optional[int] = ..., target_fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., max_batch: _Optional[int] = ..., max_context: _Optional[int] = ..., limits: _Optional[_Union[TreeLimits, _Mapping]] = ..., draft_sampling: _Optional[str] = ..., arena: _Optional[_Union[_tensor_pb2.Arena, _Mapping]] = ..., weights: _Optional[_Iterable[_Union[_tensor_pb2.Arena, _Mapping]]] = ..., protocol: _Optional[int] = ..., fused: bool = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("epoch", "kv_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    kv_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., kv_bytes: _Optional[int] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("step", "sequences", "released_slots")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceStep]
    released_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceStep, _Mapping]]] = ..., released_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceStep(_message.Message):
    __slots__ = ("slot", "begin", "new_pages", "position", "tokens", "propose", "hidden", "first_page", "device_row")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    NEW_PAGES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ROW_FIELD_NUMBER: _ClassVar[int]
    slot: int
    begin: Begin
    new_pages: _containers.RepeatedScalarFieldContainer[int]
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    propose: TreeLimits
    hidden: HiddenRows
    first_page: int
    device_row: int
    def __init__(self, slot: _Optional[int] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., new_pages: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., propose: _Optional[_Union[TreeLimits, _Mapping]] = ..., hidden: _Optional[_Union[HiddenRows, _Mapping]] = ..., first_page: _Optional[int] = ..., device_row: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("valid_from", "sampling", "scope", "traceparent")
    VALID_FROM_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    valid_from: int
    sampling: Sampling
    scope: str
    traceparent: str
    def __init__(self, valid_from: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., scope: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class HiddenRows(_message.Message):
    __slots__ = ("inline", "arena_row", "num_rows")
    INLINE_FIELD_NUMBER: _ClassVar[int]
    ARENA_ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    inline: _tensor_pb2.Tensor
    arena_row: int
    num_rows: int
    def __init__(self, inline: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., arena_row: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("step", "proposals", "extend_microseconds", "draft_microseconds")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    EXTEND_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    extend_microseconds: int
    draft_microseconds: int
    def __init__(self, step: _Optional[int] = ..., proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., extend_microseconds: _Optional[int] = ..., draft_microseconds: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("slot", "tokens", "parents", "confidence")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    confidence: int
    def __init__(self, slot: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., confidence: _Optional[int] = ...) -> None: ...
