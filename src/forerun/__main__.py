"""`python -m forerun`."""

from forerun.cli.main import main

raise SystemExit(main())
