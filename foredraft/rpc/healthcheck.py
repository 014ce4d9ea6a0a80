"""`python -m foredraft.rpc.healthcheck ADDRESS`: asks a service once how it is, for containers'
health checks.
"""

import argparse
import sys
from collections.abc import Sequence

from foredraft.config.common import ServiceTlsConfig
from foredraft.config.options import add_arguments, given_values
from foredraft.errors import ConfigError
from foredraft.rpc.channel import check_health
from foredraft.rpc.tls import service_identity


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the status; returns 0 if it is SERVING, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m foredraft.rpc.healthcheck",
        description="Asks a service once by the gRPC health protocol; exits with 0 when it serves.",
        allow_abbrev=False,
    )
    parser.add_argument("address", metavar="ADDRESS", help="host:port or unix:/path")
    parser.add_argument("--service", default="", help="name asked for; the whole server when empty")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds [2]")
    add_arguments(parser, ServiceTlsConfig)
    arguments = parser.parse_args(argv)
    try:
        config = ServiceTlsConfig(**given_values(ServiceTlsConfig, arguments))
        status = check_health(
            arguments.address,
            service=arguments.service,
            timeout=arguments.timeout,
            identity=service_identity(config),
        )
    except ConfigError as error:
        parser.error(str(error))
    print(status)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
