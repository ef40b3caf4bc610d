# Isobit on a CPU, from a checkout:
#
#     docker build --file packaging/cpu.Dockerfile --tag isobit:cpu .
#     docker run --rm isobit:cpu doctor

FROM python:3.12-slim-bookworm AS build
# pycosat, which reasoning-gym needs for one task, comes as C source only.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY src src
COPY recipes recipes
RUN python -m venv /opt/isobit \
    && /opt/isobit/bin/pip install --no-cache-dir --constraint constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu .

FROM python:3.12-slim-bookworm
COPY --from=build /opt/isobit /opt/isobit
RUN useradd --uid 1001 --create-home isobit
USER 1001
WORKDIR /home/isobit
COPY recipes recipes
ENV PATH=/opt/isobit/bin:$PATH
ENTRYPOINT ["isobit"]
CMD ["doctor"]
