"use strict";
// Sorting, filtering, CSV, light and dark; without this script the page still shows everything.
(() => {
  const root = document.documentElement;

  function remember(theme) {
    try { localStorage.setItem("tapfl-theme", theme); } catch { /* a file may have no storage */ }
  }

  function startTheme() {
    const button = document.getElementById("theme");
    try {
      const kept = localStorage.getItem("tapfl-theme");
      if (kept === "dark" || kept === "light") root.dataset.theme = kept;
    } catch { /* as above */ }
    button.hidden = false;
    button.addEventListener("click", () => {
      const now = root.dataset.theme
        || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
      root.dataset.theme = now === "dark" ? "light" : "dark";
      remember(root.dataset.theme);
    });
  }

  function value(row, column) {
    const cell = row.cells[column];
    if (!cell) return "";
    return cell.dataset.v === undefined ? cell.textContent : cell.dataset.v;
  }

  function compare(a, b, sign) {
    if (a === "" || b === "") return (a === "") - (b === "");  // what is missing comes last
    const x = Number(a), y = Number(b);
    if (!Number.isNaN(x) && !Number.isNaN(y)) return sign * (x - y);
    return sign * a.localeCompare(b, undefined, {numeric: true});
  }

  function sort(heading) {
    const table = heading.closest("table"), column = heading.cellIndex;
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentElement.cells) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => [value(row, column), row]);
    rows.sort((a, b) => compare(a[0], b[0], down ? -1 : 1));
    body.append(...rows.map((pair) => pair[1]));
  }

  function quoted(cell) {
    let shown = cell.textContent.replace(/\s*[↕▲▼]\s*$/, "").trim();
    if (/^[=+\-@]/.test(shown) && Number.isNaN(Number(shown))) shown = "'" + shown;
    return '"' + shown.replaceAll('"', '""') + '"';
  }

  function download(table) {
    const lines = Array.from(table.rows, (row) => Array.from(row.cells, quoted).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], {type: "text/csv"}));
    const name = table.caption.textContent.split(/[.:,(]/)[0].trim();
    link.download = name.replace(/[^\w-]+/g, "-").slice(0, 60) + ".csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function equip(table) {
    const tools = document.createElement("div");
    tools.className = "tools";
    if (table.tBodies[0].rows.length > 15) {
      const label = document.createElement("label"), field = document.createElement("input");
      field.type = "search";
      label.append("Filter rows", field);
      field.addEventListener("input", () => {
        const wanted = field.value.toLowerCase();
        for (const row of table.tBodies[0].rows)
          row.hidden = !row.textContent.toLowerCase().includes(wanted);
      });
      tools.append(label);
    }
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Save as CSV";
    button.addEventListener("click", () => download(table));
    tools.append(button);
    table.parentElement.before(tools);
  }

  // Samples that a method got wrong; clients with none of them are hidden, the others open.
  function filterSamples(field) {
    let shown = 0;
    for (const part of document.querySelectorAll(".samples > details")) {
      let some = 0;
      for (const card of part.querySelectorAll(".card")) {
        card.hidden = field.value !== "" && !card.dataset.wrong.split(" ").includes(field.value);
        some += !card.hidden;
      }
      part.hidden = !some;
      if (field.value !== "") part.open = some > 0;
      shown += some;
    }
    document.getElementById("sample-filter-count").textContent = shown + " shown";
  }

  function equipAll() {
    document.querySelectorAll("main table").forEach(equip);
    const field = document.getElementById("sample-filter");
    if (field) field.closest(".tools").hidden = false;
  }

  document.addEventListener("change", (event) => {
    if (event.target.id === "sample-filter") filterSamples(event.target);
  });

  document.addEventListener("click", (event) => {
    const heading = event.target.closest("th[aria-sort]");
    if (heading && event.target.closest("button")) sort(heading);
  });

  // While a run goes on, the server is asked for news; what was open stays open.
  async function update() {
    try {
      const answer = await fetch("/report", {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.statusText);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = Array.from(document.querySelectorAll("details[open][id]"), (d) => d.id);
      for (const part of ["main", "nav", "header > div"]) {
        document.querySelector(part).replaceWith(page.querySelector(part));
      }
      for (const id of open) {
        const details = document.getElementById(id);
        if (details) details.open = true;
      }
      equipAll();
      root.dataset.state = page.documentElement.dataset.state;
      if (root.dataset.state !== "watched")
        document.getElementById("status").textContent = "The run is finished.";
    } catch { /* the server may be gone: the page stays as it is */ }
    if (root.dataset.state === "watched") setTimeout(update, 5000);
  }

  startTheme();
  equipAll();
  if (root.dataset.state === "watched") setTimeout(update, 5000);
})();
