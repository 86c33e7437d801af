"""Prompts: files and data sets to rows, rows to an endless resumable stream, prompts to token ids."""
