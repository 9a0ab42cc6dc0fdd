from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ThrottleRequest(_message.Message):
    __slots__ = ["copies", "domain", "min_copies", "resource"]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    MIN_COPIES_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    copies: int
    domain: str
    min_copies: int
    resource: str
    def __init__(self, resource: _Optional[str] = ..., domain: _Optional[str] = ..., copies: _Optional[int] = ..., min_copies: _Optional[int] = ...) -> None: ...

class ThrottleResponse(_message.Message):
    __slots__ = ["all_hits_last_second", "burst", "degraded", "domain_hits_last_second", "global_limit", "granted", "hard_limit", "limited_by_global", "limited_by_hard", "retry_after_millis", "shadow", "status", "tier_hits", "tier_index", "tier_limit"]
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = []
    ALL_HITS_LAST_SECOND_FIELD_NUMBER: _ClassVar[int]
    BURST_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_HITS_LAST_SECOND_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_LIMIT_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    HARD_LIMIT_FIELD_NUMBER: _ClassVar[int]
    LIMITED_BY_GLOBAL_FIELD_NUMBER: _ClassVar[int]
    LIMITED_BY_HARD_FIELD_NUMBER: _ClassVar[int]
    OK: ThrottleResponse.Status
    REJECTED: ThrottleResponse.Status
    RETRY_AFTER_MILLIS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TIER_HITS_FIELD_NUMBER: _ClassVar[int]
    TIER_INDEX_FIELD_NUMBER: _ClassVar[int]
    TIER_LIMIT_FIELD_NUMBER: _ClassVar[int]
    all_hits_last_second: int
    burst: bool
    degraded: bool
    domain_hits_last_second: int
    global_limit: int
    granted: int
    hard_limit: int
    limited_by_global: bool
    limited_by_hard: bool
    retry_after_millis: int
    shadow: bool
    status: ThrottleResponse.Status
    tier_hits: int
    tier_index: int
    tier_limit: int
    def __init__(self, status: _Optional[_Union[ThrottleResponse.Status, str]] = ..., granted: _Optional[int] = ..., hard_limit: _Optional[int] = ..., global_limit: _Optional[int] = ..., tier_limit: _Optional[int] = ..., tier_index: _Optional[int] = ..., domain_hits_last_second: _Optional[int] = ..., all_hits_last_second: _Optional[int] = ..., tier_hits: _Optional[int] = ..., burst: bool = ..., limited_by_hard: bool = ..., limited_by_global: bool = ..., retry_after_millis: _Optional[int] = ..., degraded: bool = ..., shadow: bool = ...) -> None: ...
