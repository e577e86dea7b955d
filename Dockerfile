# The image of ray_cluster.yaml and cluster/kuberay.yaml, with the versions that were tested (constraints.txt; of these
# faiss-cuda was only chosen, as there was no GPU):
#   docker build -t your-registry/lattqe:0.2.0 .
#   docker build -t your-registry/lattqe:0.2.0-cpu --build-arg RAY=2.60.0-py311 --build-arg FAISS=cpu --build-arg TORCH=https://download.pytorch.org/whl/cpu .
# Ray's image brings Python, Ray and CUDA; `lattqe doctor` on a node says whether its driver is new enough.
ARG RAY=2.60.0-py311-gpu
FROM rayproject/ray:${RAY}
# gpu or cpu: exactly one faiss, because the CPU build hides the other.
ARG FAISS=gpu
# Where torch's wheel comes from: PyPI's for Linux is built with CUDA.
ARG TORCH=https://pypi.org/simple
WORKDIR /home/ray/lattqe
# Dependencies first: they change seldom, and the layer stays.
COPY --chown=ray:users constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir -c constraints.txt --index-url ${TORCH} --extra-index-url https://pypi.org/simple torch
COPY --chown=ray:users lattqe lattqe
COPY --chown=ray:users cluster cluster
COPY --chown=ray:users jobs jobs
RUN pip install --no-cache-dir -c constraints.txt ".[${FAISS},extract]" && lattqe --help > /dev/null
WORKDIR /home/ray
