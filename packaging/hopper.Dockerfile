# Isobit on Hopper GPUs, from a checkout. The toolkit's release is that of torch's wheels (13.0).
#
#     docker build --file packaging/hopper.Dockerfile --tag isobit:hopper .
#     docker run --rm --gpus all --ipc=host isobit:hopper doctor

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
# Triton compiles its launchers with gcc and Python's headers; DeepGEMM compiles with the image's nvcc.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY LICENSE README.md constraints-hopper.txt pyproject.toml ./
COPY src src
COPY recipes recipes
RUN python3 -m venv /opt/isobit \
    && /opt/isobit/bin/pip install --no-cache-dir --constraint constraints-hopper.txt '.[hopper]'

RUN useradd --uid 1001 --create-home isobit
USER 1001
WORKDIR /home/isobit
COPY recipes recipes
ENV CUDA_HOME=/usr/local/cuda PATH=/opt/isobit/bin:$PATH
ENTRYPOINT ["isobit"]
CMD ["doctor"]
