"use strict";

// Colours follow the system until the button is pressed; the choice is stored where that is allowed.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  try {
    const kept = localStorage.getItem("theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* a page opened as a file may have no storage */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* not kept, still shown */ }
    show();
  });
  system.addEventListener("change", show);
  button.hidden = false;
  show();
})();

// A header sorts its column: ascending, descending, and back to the order of the file.
(() => {
  const compare = (a, b) => {
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  };
  const next = { none: "ascending", ascending: "descending", descending: "none" };

  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const original = [...body.rows];
    const headers = [...table.tHead.rows[0].cells];
    const sort = (index, direction) => {
      const key = (row) => row.cells[index]?.dataset.sort ?? "";
      const sign = direction === "descending" ? -1 : 1;
      const empty = original.filter((row) => key(row) === "");
      const rows = original.filter((row) => key(row) !== "");
      if (direction !== "none") rows.sort((a, b) => sign * compare(key(a), key(b)));
      body.replaceChildren(...(direction === "none" ? original : [...rows, ...empty]));
    };
    headers.forEach((header, index) => {
      if (!header.hasAttribute("aria-sort")) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => {
        const direction = next[header.getAttribute("aria-sort")];
        for (const other of headers) {
          if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
        }
        header.setAttribute("aria-sort", direction);
        sort(index, direction);
      });
    });
  }
})();

// A link into a folded part opens it.
(() => {
  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let e = target; e; e = e.parentElement) if (e.localName === "details") e.open = true;
    target?.scrollIntoView();
  };
  addEventListener("hashchange", open);
  if (location.hash) open();
})();
