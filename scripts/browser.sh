#!/usr/bin/env bash
# The browser that tests/paper/test_page_browser.py drives: `bash scripts/browser.sh`.
# Installs Debian's chromium and chromium-driver where they are missing and this is root. Always
# succeeds, with one line that says what there is: without a browser those tests are skipped.
found() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }

if found; then
  echo "browser: $(command -v chromium)"
elif [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "browser: none; its tests are skipped (Debian: apt-get install chromium chromium-driver)"
else
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core; } \
    >/dev/null 2>&1 </dev/null
  if found; then
    echo "browser: installed $(command -v chromium)"
  else
    echo "browser: could not be installed with apt-get; its tests are skipped"
  fi
fi
exit 0
