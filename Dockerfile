# The node as an image:
#   docker build -t tollgate:local .
#   docker run --rm -p 10990:10990 -p 10991:10991 -v "$PWD/config:/etc/tollgate:ro" \
#     tollgate:local serve --limits /etc/tollgate/limits.yaml

FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
COPY . .
# The crates and what was compiled of them stay in the builder's cache, so a change of our
# own code compiles only that. A cache is no layer: the binary has to be copied out of it.
RUN --mount=type=cache,target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,target=/src/target,sharing=locked \
    cargo build --locked --release --package tollgate-server --bin tollgate \
    && cp target/release/tollgate /usr/local/bin/tollgate

# debian:bookworm-slim: the C library that the binary was linked with, and a shell for
# whoever has to look into a running container. Distroless would be some 50 MB smaller but
# has no shell; a static musl binary would need nothing at all, but musl's allocator is slow
# under many threads. ca-certificates is what rediss:// trusts; a CA of your own is named by
# SSL_CERT_FILE, or added to the system's.
FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /usr/local/bin/tollgate /usr/local/bin/tollgate

# A number needs no entry in /etc/passwd, and Kubernetes can see that it is not root.
USER 10990:10990

# In a container the loopback default would be reachable by nobody.
ENV TOLLGATE_GRPC_LISTEN=0.0.0.0:10990 \
    TOLLGATE_HTTP_LISTEN=0.0.0.0:10991
EXPOSE 10990 10991

HEALTHCHECK --interval=5s --timeout=2s --start-period=10s --retries=3 \
    CMD ["tollgate", "health"]

ENTRYPOINT ["tollgate"]
CMD ["serve"]
