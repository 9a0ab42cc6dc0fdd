from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AllowRequest(_message.Message):
    __slots__ = ["bucket_name", "criticality", "max_wait_millis_override", "max_wait_time_override", "namespace", "settle", "tokens_requested"]
    class Criticality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = []
    BUCKET_NAME_FIELD_NUMBER: _ClassVar[int]
    CRITICAL: AllowRequest.Criticality
    CRITICALITY_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MILLIS_OVERRIDE_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_TIME_OVERRIDE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NOT_CRITICAL: AllowRequest.Criticality
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    bucket_name: str
    criticality: AllowRequest.Criticality
    max_wait_millis_override: int
    max_wait_time_override: bool
    namespace: str
    settle: bool
    tokens_requested: int
    def __init__(self, namespace: _Optional[str] = ..., bucket_name: _Optional[str] = ..., tokens_requested: _Optional[int] = ..., max_wait_millis_override: _Optional[int] = ..., max_wait_time_override: bool = ..., settle: bool = ..., criticality: _Optional[_Union[AllowRequest.Criticality, str]] = ...) -> None: ...

class AllowResponse(_message.Message):
    __slots__ = ["banned", "bucket", "degraded", "fill_rate", "permit", "retry_after_millis", "shadow", "size", "soft_limited", "status", "tokens_available", "tokens_granted", "wait_millis"]
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = []
    BANNED_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    FILL_RATE_FIELD_NUMBER: _ClassVar[int]
    OK: AllowResponse.Status
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_INVALID_REQUEST: AllowResponse.Status
    REJECTED_NO_BUCKET: AllowResponse.Status
    REJECTED_SERVER_ERROR: AllowResponse.Status
    REJECTED_TIMEOUT: AllowResponse.Status
    REJECTED_TOO_MANY_BUCKETS: AllowResponse.Status
    REJECTED_TOO_MANY_TOKENS_REQUESTED: AllowResponse.Status
    RETRY_AFTER_MILLIS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SOFT_LIMITED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GRANTED_FIELD_NUMBER: _ClassVar[int]
    WAIT_MILLIS_FIELD_NUMBER: _ClassVar[int]
    banned: bool
    bucket: str
    degraded: bool
    fill_rate: float
    permit: str
    retry_after_millis: int
    shadow: bool
    size: int
    soft_limited: bool
    status: AllowResponse.Status
    tokens_available: float
    tokens_granted: int
    wait_millis: int
    def __init__(self, status: _Optional[_Union[AllowResponse.Status, str]] = ..., tokens_granted: _Optional[int] = ..., wait_millis: _Optional[int] = ..., retry_after_millis: _Optional[int] = ..., tokens_available: _Optional[float] = ..., bucket: _Optional[str] = ..., soft_limited: bool = ..., degraded: bool = ..., shadow: bool = ..., permit: _Optional[str] = ..., size: _Optional[int] = ..., fill_rate: _Optional[float] = ..., banned: bool = ...) -> None: ...
