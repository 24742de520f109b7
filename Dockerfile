# The series in a container, on Intel, AMD or Arm, with PyTorch's CPU build:
#
#   docker build --tag fsdp .
#   docker run --rm -it --memory 8g --shm-size 1g --publish 127.0.0.1:8888:8888 --volume "$PWD/work:/fsdp/work" fsdp
#
# Then open the address that JupyterLab prints. Your copies of the notebooks are in work/.
FROM python:3.11-slim AS base
RUN apt-get update \
  && apt-get install --yes --no-install-recommends git g++ make \
  && rm -rf /var/lib/apt/lists/*

FROM base
WORKDIR /fsdp
COPY . .
RUN sh docs/container.sh
EXPOSE 8888
CMD ["make", "lab", "LAB_ARGS=--ip=0.0.0.0 --no-browser"]
