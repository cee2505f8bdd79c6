"""`python -m colrow` is `colrow`: what torchrun starts."""

from colrow.cli import main

if __name__ == "__main__":
    main()
