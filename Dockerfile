# One image for every process: SuperLink, SuperNode and the executors beside them. It holds the pinned requirements and
# the code, and neither a key nor data: those are mounted.
# A tag is what its registry makes of it. With a digest, every build starts from the same bytes (docs/operate/site.md).
ARG BASE=python:3.11-slim
FROM $BASE

# cpu, or cuda for machines with an NVIDIA GPU
ARG TORCH=cpu

LABEL org.opencontainers.image.title="umbel" \
      org.opencontainers.image.description="Personalised and private federated learning, as a Flower App" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"

WORKDIR /app
COPY constraints.txt ./
COPY requirements requirements
# PyPI's own torch is the CUDA build. PyTorch's index for the CPU is another one, and nothing but torch is taken from it;
# its build has the pinned version, without a hash. All else is checked by its hash.
# Last, what no deployment needs: Ray, which runs simulations, and the tests and headers of libraries.
RUN case "$TORCH" in \
      cpu) pip install --no-cache-dir --no-compile --no-deps --constraint constraints.txt \
             --index-url https://download.pytorch.org/whl/cpu torch ;; \
      cuda) pip install --no-cache-dir --no-compile --no-deps --require-hashes --requirement requirements/cuda.txt ;; \
      *) echo "build argument TORCH must be cpu or cuda, got $TORCH" >&2; exit 1 ;; \
    esac \
 && pip install --no-cache-dir --no-compile --no-deps --require-hashes --requirement requirements/site.txt \
 && pip uninstall --yes ray \
 && libraries=$(python -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))') \
 && rm -rf "$libraries"/torch/include "$libraries"/torch/test "$libraries"/torch/bin/*[tT]est* "$libraries"/torch/bin/protoc* \
 && for library in matplotlib networkx numpy pandas scipy sympy; do \
      find "$libraries/$library" -name tests -type d -prune -exec rm -rf {} +; \
    done \
 && find "$libraries" -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything runs as the user of this number, who must own the private keys on the host: nobody else may read them.
ARG IMAGE_UID=1000
# Volumes take the owner of the folder they are first mounted on.
RUN useradd --uid "$IMAGE_UID" --no-create-home umbel \
 && mkdir /state /umbel /ledger /witness \
 && chown umbel /state /umbel /ledger /witness

COPY . .
# The programs load once, so that the bytecode of what they load is there, and no other.
RUN printf '#!/bin/sh\nPYTHONPATH=/app exec python -m umbel "$@"\n' > /usr/local/bin/umbel && chmod +x /usr/local/bin/umbel \
 && PYTHONPATH=/app FLWR_HOME=/tmp/flwr python -c \
      "import umbel.cli.main, umbel.deploy.executor, umbel.deploy.server, umbel.deploy.node, umbel.server.app" \
 && for program in flower-superlink flower-supernode flower-superexec flwr-serverapp; do \
      PYTHONPATH=/app FLWR_HOME=/tmp/flwr FLWR_DISABLE_UPDATE_CHECK=1 python -m umbel.deploy.programs "$program" --help \
        > /dev/null || exit; \
    done \
 && rm -rf /tmp/flwr
USER $IMAGE_UID

# The root file system is read-only where compose runs it: what Flower and libraries cache goes to /tmp.
ENV HOME=/tmp \
    FLWR_HOME=/tmp/flwr \
    UMBEL_HOME=/umbel \
    PYTHONUNBUFFERED=1 \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
