"""How to connect to a node."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, Union

import grpc

from .._proto.doorman_pb2_grpc import CapacityStub
from .._proto.health_pb2_grpc import HealthStub
from .._proto.holds_pb2_grpc import HoldsStub
from .._proto.quotaservice_pb2_grpc import QuotaServiceStub
from .._proto.throttle_pb2_grpc import ThrottleStub
from .._version import VERSION
from .address import Address

Options = List[Tuple[str, Union[str, int]]]


def options(address: Address, server_name: Optional[str], is_tls: bool) -> Options:
    """The options of a channel to one IP address of ``address``."""
    options: Options = [
        ("grpc.primary_user_agent", f"tollgate-client-python/{VERSION}"),
        # A new channel is a new connection, not that of an older channel to the same node.
        ("grpc.use_local_subchannel_pool", 1),
        # The library asks another node instead.
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        # The first attempt to connect again comes soon. Later ones are up to the circuit.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),
    ]
    if is_tls:
        # The certificate has the name, not the IP address that is connected to.
        options.append(("grpc.ssl_target_name_override", server_name or address.host))
    else:
        options.append(("grpc.default_authority", str(address)))
    return options


def new_channel(
    target: str, credentials: Optional[grpc.ChannelCredentials], options: Options
) -> grpc.Channel:
    """A channel of gRPC's own threads."""
    if credentials is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, credentials, options)


def methods(channel: Any) -> Dict[str, Any]:
    """The methods of a node, by the names of a connection's attributes."""
    leases, holds = CapacityStub(channel), HoldsStub(channel)
    return {
        "allow": QuotaServiceStub(channel).Allow,
        "check": HealthStub(channel).Check,
        "get_capacity": leases.GetCapacity,
        "release_capacity": leases.ReleaseCapacity,
        "hits": ThrottleStub(channel).Request,
        "reserve": holds.Reserve,
        "keep_alive": holds.KeepAlive,
        "end_session": holds.EndSession,
    }
