// Sets the colours that the user chose before the first paint. A plain script in the head: a module would run too late.
try {
  const chosen = localStorage.getItem("everstep.theme");
  if (chosen === "light" || chosen === "dark") {
    document.documentElement.dataset.theme = chosen;
  }
} catch {
  // Storage is forbidden: the system's colours are used.
}
