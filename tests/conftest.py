import watched
from helpers import INTERPRET

if INTERPRET:
    watched.watch()


def pytest_addoption(parser):
    parser.addoption("--mutants", action="store_true", help="try every mutant, not a sample")
