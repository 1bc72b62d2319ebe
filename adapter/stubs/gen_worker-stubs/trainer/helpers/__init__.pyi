from .. import *
