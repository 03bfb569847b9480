import watched
from scripts import INTERPRET

if INTERPRET:
    watched.watch()
