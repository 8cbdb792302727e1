// Package browser tests the dashboard in a real browser, Debian's chromium driven through its debugging protocol, and
// takes the screenshots of the documentation. It is a module of its own, so that the product does not depend on a
// browser's driver. Where the machine has no chromium its tests are skipped, and say so.
package browser
