"""Answers a file of prompts: ``dflash-batch`` from a checkout. ``--help`` says how."""

from serving.batch import app

if __name__ == "__main__":
    app()
