import sys

from conformance.report.report import main

sys.exit(main())
