// Memory of the devices, and page-locked memory of the host, each with an allocator that keeps what is
// freed, as torch's own do; and the check of each use of device memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

#include "clocks.h"

namespace simulated {

inline size_t from_environment(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}
inline const int num_devices = from_environment("SIMULATED_GPUS", 2);
inline const size_t total_bytes = from_environment("SIMULATED_GPU_BYTES", size_t(1) << 30);
constexpr int kMaxDevices = 64;

struct Access {
  Operation operation;
  std::string name;
};

struct DeviceBlock {
  size_t bytes;
  int device;
  int stream;  // That it was allocated for.
  bool is_used = true;
  Access write = {};                       // The last one.
  std::map<int, Access> reads = {};        // Since then, by stream.
  std::set<int> recorded = {};             // Streams named by record_stream.
  std::vector<Operation> pending = {};     // What those had to do when it was freed.
};

struct HostBlock {
  size_t bytes;
  bool is_used = true;
  std::set<int> streams = {};           // That copy from or to it.
  std::vector<Operation> pending = {};  // What those had to do when it was freed.
};

struct Usage {
  size_t reserved = 0, allocated = 0, max_allocated = 0, max_reserved = 0;
};

inline std::map<char*, DeviceBlock> device_blocks;  // By address.
inline std::map<char*, HostBlock> host_blocks;
inline std::vector<Usage> usage(kMaxDevices);

// The block that an address lies in.
template <typename Block>
Block* find(std::map<char*, Block>& blocks, const void* address) {
  auto found = blocks.upper_bound((char*)address);
  if (found == blocks.begin()) return nullptr;
  --found;
  return (char*)address < found->first + found->second.bytes ? &found->second : nullptr;
}

// Note a use of device memory, and report it if it comes too early.
inline void use(const void* address, const Operation& now, bool is_write, const std::string& name) {
  DeviceBlock* block = find(device_blocks, address);
  if (!block) return;
  const Stream& stream = streams[now.stream];
  auto race = [&](const std::string& text) {
    report("race", name + text + " (memory of " + streams[block->stream].name() + ", " +
                       std::to_string(block->bytes) + " bytes)");
  };
  auto is_early = [&](const Access& other) {
    return other.operation.stream != now.stream && !covers(stream.clock, other.operation);
  };
  auto where = [](const Access& other) {
    return other.name + " on " + streams[other.operation.stream].name();
  };
  if (!block->is_used) race(" uses freed memory on " + stream.name());
  if (is_early(block->write))
    race((is_write ? " overwrites on " : " reads on ") + stream.name() + " without waiting what " +
         where(block->write) + " writes");
  if (!is_write) {
    block->reads[now.stream] = {now, name};
    return;
  }
  for (auto& [_, read] : block->reads)
    if (is_early(read))
      race(" overwrites on " + stream.name() + " without waiting what " + where(read) + " reads");
  block->write = {now, name};
  block->reads.clear();
}

inline std::vector<Operation> latest(const std::set<int>& of) {
  std::vector<Operation> operations;
  for (int stream : of) operations.push_back({stream, streams[stream].count});
  return operations;
}

inline void free_unused(int device = -1) {
  for (auto each = device_blocks.begin(); each != device_blocks.end();) {
    DeviceBlock& block = each->second;
    if (block.is_used || (device >= 0 && block.device != device)) {
      ++each;
      continue;
    }
    usage[block.device].reserved -= block.bytes;
    free(each->first);
    each = device_blocks.erase(each);
  }
}

// Like torch's allocator, it gives freed memory at once to the stream that it was allocated for, and
// waits only for the streams that record_stream named.
inline void* allocate_on_device(size_t bytes, int device) {
  Lock lock(mutex);
  if (!bytes) return nullptr;
  constexpr size_t kSmall = 512, kLarge = size_t(2) << 20;
  size_t unit = bytes < (size_t(1) << 20) ? kSmall : kLarge;
  size_t wanted = (bytes + unit - 1) / unit * unit;
  int stream = current_stream(device);
  auto best = device_blocks.end();
  for (auto each = device_blocks.begin(); each != device_blocks.end(); ++each) {
    DeviceBlock& block = each->second;
    bool fits = !block.is_used && block.device == device && block.stream == stream &&
                block.bytes >= wanted && block.bytes <= 2 * wanted && covers(host, block.pending);
    if (fits && (best == device_blocks.end() || block.bytes < best->second.bytes)) best = each;
  }
  Usage& used = usage[device];
  if (best == device_blocks.end()) {
    if (used.reserved + wanted > total_bytes) free_unused(device);
    TORCH_CHECK(used.reserved + wanted <= total_bytes, "CUDA out of memory (simulated): ", wanted,
                " bytes wanted, ", used.reserved, " of ", total_bytes, " in use");
    char* address = (char*)aligned_alloc(512, wanted);
    best = device_blocks.emplace(address, DeviceBlock{wanted, device, stream}).first;
    used.reserved += wanted;
    used.max_reserved = std::max(used.max_reserved, used.reserved);
  }
  DeviceBlock& block = best->second;
  block.is_used = true;
  block.recorded.clear();
  block.pending.clear();
  used.allocated += block.bytes;
  used.max_allocated = std::max(used.max_allocated, used.allocated);
  // Memory that is used again does not have its old content, nor zeros.
  memset(best->first, 0xA5, bytes);
  return best->first;
}

inline void free_on_device(void* address) {
  Lock lock(mutex);
  auto found = device_blocks.find((char*)address);
  if (found == device_blocks.end()) return;
  DeviceBlock& block = found->second;
  block.is_used = false;
  usage[block.device].allocated -= block.bytes;
  block.recorded.erase(block.stream);
  block.pending = latest(block.recorded);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, current_device); }
  c10::DataPtr allocate_on(size_t bytes, int device) {
    void* address = allocate_on_device(bytes, device);
    return {address, address, &free_on_device, c10::Device(c10::kCUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    memcpy(target, source, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(mutex);
    free_unused();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Lock lock(mutex);
    if (DeviceBlock* block = find(device_blocks, pointer.get()))
      block->recorded.insert(stream_number(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {total_bytes - usage[device].reserved, total_bytes};
  }
};
inline DeviceAllocator device_allocator;

inline void free_on_host(void* address) {
  Lock lock(mutex);
  auto found = host_blocks.find((char*)address);
  if (found == host_blocks.end()) return;
  HostBlock& block = found->second;
  block.is_used = false;
  block.pending = latest(block.streams);
  block.streams.clear();
}

// Like torch's own, it rounds up to a power of two, and gives memory again once copies are done.
struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(mutex);
    if (!bytes) return {nullptr, nullptr, &free_on_host, c10::kCPU};
    size_t wanted = 512;
    while (wanted < bytes) wanted *= 2;
    auto found = std::find_if(host_blocks.begin(), host_blocks.end(), [&](auto& each) {
      const HostBlock& block = each.second;
      return !block.is_used && block.bytes == wanted && covers(host, block.pending);
    });
    if (found == host_blocks.end()) {
      char* address = (char*)aligned_alloc(512, wanted);
      found = host_blocks.emplace(address, HostBlock{wanted}).first;
    }
    found->second.is_used = true;
    found->second.pending.clear();
    memset(found->first, 0x5A, bytes);
    return {found->first, found->first, &free_on_host, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_host; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    memcpy(target, source, bytes);
  }
  bool record_event(void* address, void*, c10::Stream stream) override {
    Lock lock(mutex);
    HostBlock* block = find(host_blocks, address);
    if (block) block->streams.insert(stream_number(stream.device_index(), stream.id()));
    return block;
  }
  void empty_cache() override {
    Lock lock(mutex);
    for (auto each = host_blocks.begin(); each != host_blocks.end();) {
      if (each->second.is_used || !covers(host, each->second.pending)) {
        ++each;
        continue;
      }
      free(each->first);
      each = host_blocks.erase(each);
    }
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline HostAllocator host_allocator;

}  // namespace simulated
