/* The members of a sweep: their colours, and switches to show them. */

/** Light to strong with κ₂ up to the paper's 1, another hue beyond; none is the colour of text. */
function memberColour(section, index) {
  const { kappa, known } = section.members[index];
  if (!known) return APART[index % APART.length];
  if (kappa === null) return theme().text;
  const strengths = [...new Set(section.members.map((member) => member.kappa))].filter((each) => each !== null);
  const group = strengths.filter((each) => each <= 1 === kappa <= 1).sort((a, b) => a - b);
  const share = group.length > 1 ? group.indexOf(kappa) / (group.length - 1) : 1;
  return along(RAMPS[theme().name][kappa <= 1 ? "within" : "beyond"], share);
}

/** Without LocAteR: drawn dashed. */
function isWithout({ known, kappa }) {
  return known && kappa === null;
}

/** Switches: for each strength one, and one for each of its seeds; or one for each name. `on` has what is shown. */
function memberSwitches(section, on, tell) {
  const every = range(section.members.length);
  const switches = [];
  const show = () => {
    for (const [button, members] of switches)
      button.setAttribute("aria-pressed", String(members.every((member) => on.has(member))));
  };
  const set = (members, value) => {
    for (const member of members) value ? on.add(member) : on.delete(member);
    show();
    tell();
  };
  const button = (members, kind, label, ...inside) => {
    const turn = () => set(members, !members.every((member) => on.has(member)));
    const made = el(kind, { type: "button", "aria-label": label, onclick: turn }, inside);
    switches.push([made, members]);
    return made;
  };
  const strand = ([strength, members]) => {
    const look = isWithout(section.members[members[0]]) ? "member dashed" : "member";
    const mark = swatch(look, () => memberColour(section, members[0]));
    const seed = (member) =>
      button([member], "button.seed", section.members[member].label, String(section.members[member].seed));
    const seeds = members.length > 1 ? el("span.seeds", members.map(seed)) : null;
    return el("span.strand", button(members, "button.strength", strength, mark, strength), seeds);
  };
  const groups = new Map();
  for (const member of every) {
    const strength = section.members[member].label.replace(/, seed \d+$/, "");
    groups.set(strength, [...(groups.get(strength) ?? []), member]);
  }
  const all = [true, false].map((value) =>
    el("button.plain", { type: "button", onclick: () => set(every, value) }, value ? "all" : "none"),
  );
  const box = el("div.switches", { role: "group", "aria-label": "members to show" });
  box.append(...[...groups].map(strand), el("span.strand", all));
  show();
  return box;
}
