# On a fresh machine: `make demo`, `make check`, `make test`. All set themselves up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Installed once and again only when one of these changes.
STAMP  := $(VENV)/.installed
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: demo check test lint style browser faults fuzz audit clean

# SHUFFLE=3 runs the tests in an order drawn from that seed.
# mypy has only one thread: it runs beside the tests, and what it says comes last.
define tests_and_types
$(BIN)/mypy >$(VENV)/types.txt 2>&1 & types=$$!; \
$(BIN)/python -m pytest -n 2 $(1) $(if $(SHUFFLE),--shuffle $(SHUFFLE)); tests=$$?; \
wait $$types; types=$$?; cat $(VENV)/types.txt; exit $$((tests | types))
endef

demo: $(STAMP)
	$(BIN)/lattqe demo --to demo

# Before every commit: no Ray, no S3 server, no kills, nothing that takes more than a second or two.
check: $(STAMP) style
	$(call tests_and_types,-m "not ray and not s3 and not kill and not slow")

# Everything that must hold; the longest runs with several nodes are left to `make faults`.
test: $(STAMP) style browser
	$(call tests_and_types,-m "not long")

# The report is tested in a real Chromium: installed where we are allowed to, else that test says that it is missing.
browser:
	@command -v chromedriver >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  (apt-get -qq update && apt-get -qq install -y chromium chromium-driver) >/dev/null 2>&1 || true; fi

# Faults of every kind over the whole pipeline; SEEDS="1 2 3" ROUNDS=60 for more of them.
SEEDS  ?= 1
ROUNDS ?= 36
faults: $(STAMP)
	$(BIN)/python -m pytest -m long
	$(BIN)/python -m pytest tests/faults -m "not long"
	$(BIN)/python tests/faults/augment_campaign.py --seed $(SEEDS) --rounds 10
	$(BIN)/python tests/faults/campaign.py --seed $(SEEDS) --rounds $(ROUNDS)

fuzz: $(STAMP)
	$(BIN)/python tests/faults/fuzz_readers.py --count 100000

# Dependencies as pinned, none below a known hole; pip-audit too where it is installed and has a network. The bill of
# materials (CycloneDX) goes to build/sbom.json.
audit: $(STAMP)
	$(BIN)/python .ci/audit.py --sbom build/sbom.json

lint: style
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

# A recent pip reads the index in half the time of the one that Python 3.11 brings. Modules are compiled when they are
# first imported: most of what comes with torch and Ray never is.
INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "pip>=26"
	$(INSTALL) "torch==2.13.0"
	$(INSTALL) -e ".[cpu,extract,test]"
	touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info
