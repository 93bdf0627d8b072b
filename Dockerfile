# One peer in a container: `docker build --tag valence .`
# If packages come through a proxy on this machine: `docker build --network host --tag valence .`
FROM python:3.11-slim AS build
WORKDIR /src
RUN python3 -m venv /opt/valence
COPY pyproject.toml README.md ./
# Dependencies first: Docker reuses these layers while only our own files change.
RUN python3 -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))' > needs.txt \
 && /opt/valence/bin/pip install --no-cache-dir --disable-pip-version-check --requirement needs.txt
COPY workflow workflow
COPY protocols protocols
COPY peer peer
COPY master master
COPY valence valence
RUN /opt/valence/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps . \
 && find /opt/valence -name '__pycache__' -prune -exec rm -rf {} + \
 && rm -rf /opt/valence/lib/python3*/site-packages/pip* /opt/valence/bin/pip* \
 && /opt/valence/bin/python -m compileall -q /opt/valence/lib

FROM python:3.11-slim
# The sandbox for tasks, where the container may create user namespaces.
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /data --shell /usr/sbin/nologin valence \
 && install -d -o valence -g valence -m 700 /data
COPY --from=build /opt/valence /opt/valence
USER valence
WORKDIR /data
ENV PATH=/opt/valence/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    VALENCE_DATA=/data \
    VALENCE_HOST=0.0.0.0 \
    VALENCE_PORT=7470 \
    VALENCE_HTTP_HOST=0.0.0.0 \
    VALENCE_HTTP_PORT=8470
EXPOSE 7470/udp 7470/tcp 8470/tcp
HEALTHCHECK --interval=60s --timeout=5s --retries=3 \
    CMD ["python", "-I", "-m", "valence.peer.healthy"]
ENTRYPOINT ["valence"]
CMD ["peer"]
