/* Tables that sort by a click on a column's head; rows beyond a page wait for a button. */

const PAGE = 50;

/**
 * columns: [{name, values, words?, digits?}] with one value a row. `pick` is given the row that was clicked.
 * Returns the element, with .select(row) to mark one.
 */
function sortable(columns, { pick, sortBy = null, label = "", all = false } = {}) {
  const count = columns[0].values.length;
  for (const column of columns)
    column.long = column.words && column.values.some((value) => String(value ?? "").length > 40);
  let order = range(count);
  let sorted = sortBy; // {column, down}
  let most = all ? count : PAGE;
  let marked = -1;

  const heads = columns.map((column, index) => {
    const button = el("button", { type: "button", onclick: () => sort(index) }, math(column.name));
    return el("th", { scope: "col", class: column.words ? null : "number" }, button);
  });
  const body = el("tbody");
  const rest = el("button.more", { type: "button", onclick: () => ((most = count), fill()) });
  const left = el("p.left");

  function sort(index) {
    const down = sorted && sorted.column === index ? !sorted.down : !columns[index].words;
    sorted = { column: index, down };
    fill();
  }

  function arrange() {
    order = range(count);
    if (!sorted) return;
    const { values, words } = columns[sorted.column];
    const sign = sorted.down ? -1 : 1;
    const missing = (value) => value == null || Number.isNaN(value);
    order.sort((a, b) => {
      const [x, y] = [values[a], values[b]];
      if (missing(x) || missing(y)) return missing(x) - missing(y); // last, whichever way
      return sign * (words ? String(x).localeCompare(String(y), "en", { numeric: true }) : x - y) || a - b;
    });
  }

  function fill() {
    arrange();
    heads.forEach((head, index) => {
      const way = sorted && sorted.column === index ? (sorted.down ? "descending" : "ascending") : null;
      if (way) head.setAttribute("aria-sort", way);
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...order.slice(0, most).map(line));
    rest.hidden = most >= count;
    rest.textContent = `show all ${count.toLocaleString("en-US")}`;
    left.textContent = `the first ${Math.min(40, most)} of ${count.toLocaleString("en-US")} rows, in this order`;
    left.hidden = count <= 40;
  }

  function line(row) {
    const cells = columns.map(({ name, values, words, digits, long }) =>
      el(
        "td",
        { class: words ? (long ? "long" : null) : "number", "data-name": words ? null : name },
        words ? String(values[row] ?? "") : shown(values[row], digits),
      ),
    );
    const made = el("tr", { "data-row": row, "aria-selected": pick ? String(row === marked) : null }, cells);
    if (pick) {
      made.tabIndex = 0;
      made.addEventListener("click", () => pick(row));
      made.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        pick(row);
      });
    }
    return made;
  }

  const table = el("table", { "aria-label": label }, el("thead", el("tr", heads)), body);
  const made = el(
    "div.sortable",
    el("div.scroll", { tabindex: "0", role: "region", "aria-label": label }, table),
    rest,
    left,
  );
  if (pick) made.classList.add("picking");
  made.select = (row) => {
    marked = row;
    for (const each of body.children) each.setAttribute("aria-selected", String(Number(each.dataset.row) === row));
  };
  fill();
  return made;
}
