"""Writers of what happened: event log, Lightning logger, uploads."""
