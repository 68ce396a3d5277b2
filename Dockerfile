# An image that has onnxtrain with CUDA and Open MPI, and the BERT example in /workspace/bert:
#     docker build -t onnxtrain . && docker run --gpus all --ipc=host -v /data:/data onnxtrain
# --build-arg BASE=debian:12 --build-arg CUDA= gives one for the CPU. /data/128 and /data/512 are the files of bertPrep.py.
ARG BASE=nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04
FROM ${BASE} AS build
ARG CUDA=--use_cuda
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        build-essential python3 python3-dev python3-venv protobuf-c-compiler protobuf-compiler libprotobuf-c-dev \
        libopenmpi-dev openmpi-bin && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHON=/opt/venv/bin/python
COPY . /source
# Another compiler than the tree is tried with may warn of something new.
RUN cd /source && ONNXTRAIN_WERROR=0 ./build.sh --enable_training ${CUDA} --use_mpi --config Release --build_wheel

FROM ${BASE}
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        python3 python3-venv openmpi-bin openssh-client libgomp1 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
# In a container a process may not read another's memory, which Open MPI would do.
ENV PATH=/opt/venv/bin:$PATH OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_btl_vader_single_copy_mechanism=none
COPY --from=build /source/build/Linux/Release/dist /wheel
RUN pip install --no-cache-dir /wheel/*.whl h5py tokenizers tqdm matplotlib && python -m onnxtrain
COPY examples/bert_pretraining /workspace/bert
WORKDIR /workspace/bert
CMD ["bash", "run_pretraining_ort.sh"]
