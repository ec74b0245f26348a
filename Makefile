.PHONY: setup test check demo bench bench-faults reward-hacking
run := .venv/bin/python -m

setup:
	@infra/setup.sh

check: setup
	$(run) ruff check
	$(run) ruff format --check
	$(run) mypy
	.venv/bin/lint-imports

test: check
	$(run) pytest -n 2 --dist loadfile

demo: setup
	.venv/bin/rollbook run infra/configs/smollm2.toml
	.venv/bin/rollbook audit

bench: setup
	$(run) tests.bench

bench-faults: setup
	$(run) tests.bench.faults

reward-hacking: setup
	.venv/bin/python infra/experiments/reward_hacking.py
