# tidegate in a container. CPU (default):
#   docker build -t tidegate . && docker run -p 127.0.0.1:8000:8000 -v ./tidegate.toml:/etc/tidegate.toml:ro tidegate
# CUDA 13:
#   docker build --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 --build-arg EXTRAS=cuda13 -t tidegate:cuda13 .
# A server that listens beyond loopback needs [auth] keys: see README, "Operations".
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG EXTRAS=
RUN command -v python3 >/dev/null && python3 -m venv --help >/dev/null 2>&1 \
    || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*)
WORKDIR /opt/tidegate
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY kernels_pallas kernels_pallas
COPY model model
COPY quant quant
COPY serving serving
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --only-binary=:all: --no-binary=tidegate -c constraints.txt ".${EXTRAS:+[${EXTRAS}]}"
RUN useradd --create-home tidegate
USER tidegate
# Compiled programs outlive the container when this is a volume.
VOLUME /home/tidegate/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/tidegate/.venv/bin/tidegate"]
CMD ["serve", "--config", "/etc/tidegate.toml", "--host", "0.0.0.0"]
