// Who waits for whom: streams, events and the program, by vector clocks as race detectors use them.
//
// Each stream counts its operations. A clock says, for each stream, up to which of its operations its
// owner has waited. Work may use what another stream wrote only if its clock covers that write.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {

// Kernels are called from several threads, with and without Python's lock.
inline std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

using Clock = std::vector<uint64_t>;  // By stream: how many of its operations.

inline void merge(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

struct Operation {
  int stream = -1;
  uint64_t number = 0;  // 0: none
};

inline bool covers(const Clock& clock, const Operation& operation) {
  if (operation.number == 0) return true;
  size_t stream = operation.stream;
  return stream < clock.size() && clock[stream] >= operation.number;
}

inline bool covers(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); i++)
    if (!covers(clock, Operation{(int)i, other[i]})) return false;
  return true;
}

inline bool covers(const Clock& clock, const std::vector<Operation>& operations) {
  return std::all_of(operations.begin(), operations.end(),
                     [&](const Operation& each) { return covers(clock, each); });
}

struct Stream {
  int device;
  int64_t id;
  Clock clock;
  uint64_t count = 0;
  double ready_s = 0;  // When its operations so far are done.

  std::string name() const {
    return "cuda:" + std::to_string(device) + "/stream " + std::to_string(id);
  }
};

inline std::vector<Stream> streams;
inline std::map<std::pair<int, int64_t>, int> stream_numbers;
inline Clock host;  // What the program has waited for.

// The current device and streams are those of a thread.
inline thread_local int current_device = 0;
inline thread_local std::map<int, int64_t> current_streams;

inline int64_t current_stream_id(int device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? 0 : found->second;
}

inline int stream_number(int device, int64_t id) {
  auto [found, is_new] = stream_numbers.try_emplace({device, id}, streams.size());
  if (is_new) streams.push_back({device, id, {}, 0, 0});
  return found->second;
}

inline int current_stream(int device) { return stream_number(device, current_stream_id(device)); }

// Time passes for streams too: each operation takes this long, and begins when it is enqueued or when
// the one before it is done. The values are there at once; only events tell when they would be.
inline double operation_s = 0;

inline double now_s() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

inline double ready_s(int stream) { return std::max(streams[stream].ready_s, now_s()); }

// An operation that is enqueued now: it comes after all that the program has waited for.
inline Operation launch(int stream) {
  Stream& state = streams[stream];
  state.count++;
  state.ready_s = ready_s(stream) + operation_s;
  merge(state.clock, host);
  if (state.clock.size() <= (size_t)stream) state.clock.resize(stream + 1);
  state.clock[stream] = state.count;
  return {stream, state.count};
}

// All work that is enqueued in a stream so far.
inline Clock enqueued(int stream) {
  Clock clock = streams[stream].clock;
  if (clock.size() <= (size_t)stream) clock.resize(stream + 1);
  clock[stream] = streams[stream].count;
  return clock;
}

inline void wait_for(int waiting, int other) {
  merge(streams[waiting].clock, enqueued(other));
  streams[waiting].ready_s = std::max(streams[waiting].ready_s, streams[other].ready_s);
}

// Reports go to Python, or to standard error before it is there.
using Callback = void (*)(const char* kind, const char* text);
inline Callback callback = nullptr;
inline thread_local bool is_reporting = false;

inline void report(const char* kind, const std::string& text) {
  if (is_reporting) return;  // The callback may run operations itself.
  is_reporting = true;
  if (callback)
    callback(kind, text.c_str());
  else
    fprintf(stderr, "[simulated GPU] %s: %s\n", kind, text.c_str());
  is_reporting = false;
}

// A copy from page-locked memory: its source must not change before the program has waited for it.
struct Upload {
  Operation operation;
  const char* source;
  size_t bytes;
  uint64_t sum;
};
inline std::list<Upload> uploads;

// A copy to page-locked memory: its result appears when the program has waited for it.
struct Download {
  Operation operation;
  std::function<void()> finish;
};
inline std::list<Download> downloads;

inline uint64_t sum_of(const char* bytes, size_t count) {
  uint64_t sum = 1469598103934665603ull;  // FNV-1a, eight bytes at a time
  for (size_t i = 0; i < count; i += 8) {
    uint64_t word = 0;
    memcpy(&word, bytes + i, std::min<size_t>(8, count - i));
    sum = (sum ^ word) * 1099511628211ull;
  }
  return sum;
}

inline void check_uploads() {
  for (auto each = uploads.begin(); each != uploads.end();) {
    if (sum_of(each->source, each->bytes) != each->sum) {
      report("race", "host memory changed while " + streams[each->operation.stream].name() +
                         " may still copy from it (" + std::to_string(each->bytes) + " bytes)");
      each = uploads.erase(each);
    } else {
      each = covers(host, each->operation) ? uploads.erase(each) : std::next(each);
    }
  }
}

// The program waits until all work that a clock stands for is done.
inline void wait_on_host(const Clock& clock) {
  check_uploads();
  merge(host, clock);
  check_uploads();
  for (auto each = downloads.begin(); each != downloads.end();) {
    if (covers(host, each->operation)) {
      each->finish();
      each = downloads.erase(each);
    } else {
      ++each;
    }
  }
}

inline void wait_on_host(const Clock& clock, const std::string& what) {
  wait_on_host(clock);
  report("wait", what);
}

inline void synchronize(int device) {
  for (size_t i = 0; i < streams.size(); i++)
    if (streams[i].device == device) wait_on_host(enqueued(i));
  report("wait", "synchronize a device");
}

}  // namespace simulated
