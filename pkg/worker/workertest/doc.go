// Package workertest has inference servers for tests: scripted ones, and real ones around tesseract
// and Node.
package workertest
