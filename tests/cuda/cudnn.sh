#!/usr/bin/env bash
# Whether the true cuDNN takes the graphs of cuda/libs/sdpa.c and conv_graph.c, and the recurrent layers of rnn.c, without
# a GPU: cudnn_plans.c and cudnn_layers.c say how.
# Installs cuDNN, cuBLAS and NVRTC (wheels of about 900 MB together) into build/cudnn, and needs the headers of the CUDA
# toolkit.
#
#     PYTHON=python bash tests/cuda/cudnn.sh [cuDNN's version, such as 9.15.1.9]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
folder=build/cudnn${1:+-$1}
cuda=$(PYTHONPATH=third_party "$python" -c 'import dependencies; print(dependencies.cuda_home())')
[ -e "$folder/nvidia/cudnn" ] ||
    "$python" -m pip install -q --no-deps --target "$folder" "nvidia-cudnn-cu13${1:+==$1}" nvidia-cublas nvidia-cuda-nvrtc
flags=(-std=gnu11 -O1 -Wall -Wextra -D_GNU_SOURCE -Icuda -Icsrc)
cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$folder/libcuda.so.1" tests/cuda/driver.c
cc "${flags[@]}" -isystem "$folder/nvidia/cudnn/include" -isystem "$cuda/include" -o "$folder/plans" \
    tests/cuda/cudnn_plans.c cuda/libs/sdpa.c cuda/libs/conv_graph.c -ldl -lpthread -lm
cc "${flags[@]}" -isystem "$cuda/include" -o "$folder/layers" tests/cuda/cudnn_layers.c -ldl
export LD_LIBRARY_PATH=$folder:$folder/nvidia/cudnn/lib:$folder/nvidia/cu13/lib
"$folder/layers" libcudnn.so.9
"$folder/plans" libcudnn.so.9
