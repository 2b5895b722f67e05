"""Where the time of an iteration goes, stage by stage: --timing-log-level and its relatives."""
